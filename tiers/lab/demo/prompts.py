"""What the demo asks: documents with questions about them, as chat messages."""

from __future__ import annotations

from importlib import resources
from typing import Any, NamedTuple

import yaml

Messages = list[dict[str, str]]
"""A chat as engines take it: `{"role": ..., "content": ...}`, oldest first."""


class Conversation(NamedTuple):
    """One measured prompt: a document, an earlier question and its answer, and a question."""

    title: str
    messages: Messages


def conversations() -> list[Conversation]:
    """The measured conversations, each of several hundred tokens."""
    return [_conversation(entry) for entry in _load()["conversations"]]


def warm_up() -> Conversation:
    """A shorter conversation about something else, asked before anything is measured."""
    return _conversation(_load()["warm_up"])


def _load() -> dict[str, Any]:
    source = resources.files("tiers.lab.demo") / "conversations.yaml"
    loaded: dict[str, Any] = yaml.safe_load(source.read_text(encoding="utf-8"))
    return loaded


def _conversation(entry: dict[str, Any]) -> Conversation:
    questions = [turn["user"] for turn in entry["turns"]] + [entry["question"]]
    questions[0] = f"{entry['document']}\n{questions[0]}"
    answers = [turn["assistant"] for turn in entry["turns"]]
    messages = [{"role": "user", "content": questions[0]}]
    for answer, question in zip(answers, questions[1:], strict=True):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": question})
    return Conversation(entry["title"], messages)
