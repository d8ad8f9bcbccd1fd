"""The chain against its model: whatever is stored, lost, broken or restarted, answers are right."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from spec.chain import LOAD_POLICIES, ChainSpec
from tests.soak.faults import Sabotaged
from tests.support.replay import ReplayEngine, ReplayRequest, answer
from tests.support.replay_chains import MODEL, SLOT, close, cpu, damage_disk
from tiers.disk.spec import DiskSpec

ROOTS = [[13 * root + token for token in range(30)] for root in range(3)]
PROMPTS = st.tuples(st.sampled_from(ROOTS), st.integers(1, 30), st.integers(0, 3))


class ChainMachine(RuleBasedStateMachine):
    """An engine over host memory and two disks, one of which is meddled with."""

    @initialize(
        load_policy=st.sampled_from(LOAD_POLICIES),
        load_when=st.sampled_from(["sooner", "always"]),
        prefix_caching=st.booleans(),
        world_size=st.integers(1, 2),
        store_threshold=st.integers(1, 2),
    )
    def begin(
        self,
        load_policy: str,
        load_when: str,
        prefix_caching: bool,
        world_size: int,
        store_threshold: int,
    ) -> None:
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        good, bad = (
            DiskSpec.model_validate({"path": self.folder / name, "capacity": 24 * 2 * SLOT})
            for name in ("good", "bad")
        )
        self.bad = Sabotaged.model_validate(
            {"type": "disk", "name": "bad", "inner": bad, "deadline": "100ms"}
        )
        kept = cpu(12, verify="always", store_threshold=store_threshold)
        self.chain = ChainSpec.model_validate(
            {
                "version": 1,
                "load_policy": load_policy,
                "load_when": load_when,
                "max_wait": "200ms",
                "staging": 24 * SLOT,
                "tiers": [kept, self.bad, good],
            }
        )
        self.caching, self.ranks = prefix_caching, world_size
        self.running: list[tuple[ReplayRequest, list[int]]] = []
        self.start()

    def start(self) -> None:
        self.engine = ReplayEngine(
            self.chain,
            num_blocks=40,
            batch_tokens=32,
            prefix_caching=self.caching,
            world_size=self.ranks,
        )

    @rule(prompt=PROMPTS, tokens=st.integers(1, 6))
    def ask(self, prompt: tuple[list[int], int, int], tokens: int) -> None:
        root, length, tail = prompt
        whole = root[:length] + [900 + tail] * tail
        self.running.append((self.engine.add(whole, tokens), whole))

    @rule(steps=st.integers(1, 12))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        request, _ = self.running.pop(which % len(self.running))
        self.engine.scheduler.abort(request.request_id)

    @rule(kind=st.sampled_from(["", "", "slow", "hanging", "failing", "full", "boastful"]))
    def meddle(self, kind: str) -> None:
        self.bad.mood.turn(kind)

    @rule(name=st.sampled_from(["good", "bad"]))
    def damage(self, name: str) -> None:
        damage_disk(self.folder / name)

    @rule()
    def reset(self) -> None:
        self.engine.reset_cache()

    @rule()
    def restart(self) -> None:
        self.bad.mood.turn("")
        self.end_all()
        close(self.engine)
        self.start()

    def end_all(self) -> None:
        self.engine.run()
        self.answers_are_right()
        assert not self.running

    @invariant()
    def answers_are_right(self) -> None:
        for request, prompt in list(getattr(self, "running", ())):
            right = answer(MODEL, prompt, request.max_tokens, self.ranks)
            assert request.output == right[: len(request.output)]
            if len(request.output) == request.max_tokens:
                self.running.remove((request, prompt))

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.bad.mood.turn("")
            self.end_all()
            close(self.engine)
            self.stack.close()


def test_the_chain_is_no_worse_than_its_model() -> None:
    run_state_machine_as_test(
        ChainMachine,
        settings=settings(
            max_examples=8,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
