"""How long the prompts of ``fp8rl exact`` may be; test_exact_replay.py runs the engine."""

from __future__ import annotations

import pytest

from fp8rl.errors import ModelError
from vllm_fp8rl.commands.exact_record import _prompt_length


@pytest.mark.parametrize(("positions", "longest"), [(None, 200), (40960, 200), (64, 32), (34, 2)])
def test_a_prompt_leaves_room_for_its_answer(positions, longest):
    assert _prompt_length({"max_position_embeddings": positions}) == longest


def test_a_model_without_room_is_refused():
    with pytest.raises(ModelError, match="max_position_embeddings is 33, too few"):
        _prompt_length({"max_position_embeddings": 33})
