"""HotPrefix: the blocks with which most prompts begin."""

from __future__ import annotations

from collections.abc import Sequence


class HotPrefix:
    """Finds a prefix that more than half of the prompts share, as a system prompt is.

    Whether one such block is in a sample or not outweighs all other errors of the sample, so these
    are counted exactly. Majority vote of Boyer and Moore, 1981, over the prompts' first blocks.
    """

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._votes = 0

    def shared_by(self, prompt: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks are hot. `prompt`: the hashes of its blocks, each of
        which stands for those before it, too."""
        if not prompt:
            return 0
        if self._blocks and prompt[0] == self._blocks[0]:
            self._votes += 1
            return self._keep_common(prompt)
        self._votes -= 1
        if self._votes < 0:
            self._blocks, self._votes = list(prompt), 1
        return 0

    def _keep_common(self, prompt: Sequence[bytes]) -> int:
        blocks = self._blocks
        same, differs = 0, min(len(blocks), len(prompt))
        if blocks[differs - 1] != prompt[differs - 1]:
            differs -= 1
            while differs - same > 1:
                middle = (same + differs) // 2
                if blocks[middle] == prompt[middle]:
                    same = middle
                else:
                    differs = middle
        del blocks[differs:]
        return differs
