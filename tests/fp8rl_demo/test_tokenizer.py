from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8rl_demo.tokenizer import CHARACTERS, CharTokenizer

TOKENIZER = CharTokenizer()


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The tokenizer as vLLM gets it: saved, then read back by AutoTokenizer without a network."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    yield AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_any_text_encodes_alike_and_any_ids_decode_alike(hf: Any) -> None:
    ours = (TOKENIZER.pad_id, TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.unk_id)
    assert (hf.pad_token_id, hf.bos_token_id, hf.eos_token_id, hf.unk_token_id) == ours
    assert len(hf) == TOKENIZER.vocab_size == 128

    @given(st.text(CHARACTERS, max_size=20), st.booleans(), st.lists(st.integers(0, 127)))
    def check(text: str, bos: bool, ids: list[int]) -> None:
        encoded = TOKENIZER.encode(text, add_bos=bos)
        assert encoded == hf(text, add_special_tokens=bos).input_ids
        assert TOKENIZER.decode(encoded) == text
        assert TOKENIZER.decode(ids) == hf.decode(ids, skip_special_tokens=True)

    check()


def test_a_foreign_character_is_an_error_here_and_unknown_there(hf: Any) -> None:
    with pytest.raises(KeyError, match="x"):
        TOKENIZER.encode("3x4")
    ids = hf("3x4\n", add_special_tokens=False).input_ids
    assert [i == TOKENIZER.unk_id for i in ids] == [False, True, False, True]
