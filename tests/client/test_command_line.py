from __future__ import annotations

import pytest

from runstate.command_line import without_secrets


@pytest.mark.parametrize(
    "given, shown",
    [
        ("agent.py --run nightly -n 3", "agent.py --run nightly -n 3"),
        ("agent.py --api-key sk-live-1 --run x", "agent.py --api-key *** --run x"),
        ("agent.py --api-key=sk-live-1", "agent.py --api-key=***"),
        ("agent.py --password -v", "agent.py --password -v"),
        ("agent.py OPENAI_API_KEY=abc", "agent.py OPENAI_API_KEY=***"),
        ("agent.py sk-live-SECRET", "agent.py ***"),
        ("agent.py rsk_k1_abcdefghijklm", "agent.py ***"),
        ("agent.py ghp_0123456789abcdef", "agent.py ***"),
        ("agent.py eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9", "agent.py ***"),
        ("agent.py --url postgres://me:pw@db/x", "agent.py --url postgres://***@db/x"),
        ("agent.py 7f4d1c09aa1b4be9b6f0c5d3e2a19b88", "agent.py ***"),
        ("agent.py --data=7f4d1c09aa1b4be9b6f0c5d3e2a19b88", "agent.py --data=***"),
        ("/home/me/skills/task-runner.py skip_it", "/home/me/skills/task-runner.py skip_it"),
    ],
)
def test_what_looks_like_a_secret_is_not_shown(given: str, shown: str) -> None:
    assert without_secrets(given.split()) == shown
