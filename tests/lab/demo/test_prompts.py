"""The demo's conversations are chats, long enough to be worth loading."""

from __future__ import annotations

from tiers.lab.demo.prompts import conversations, warm_up


def test_conversations_are_long_multi_turn_chats_that_end_with_a_question() -> None:
    for conversation in conversations():
        roles = [message["role"] for message in conversation.messages]
        assert roles == ["user", "assistant", "user"]
        assert len(conversation.messages[0]["content"].split()) > 500
        assert conversation.messages[-1]["content"].endswith("?")


def test_no_two_conversations_share_a_beginning() -> None:
    beginnings = {c.messages[0]["content"][:20] for c in [*conversations(), warm_up()]}
    assert len(beginnings) == len(conversations()) + 1
