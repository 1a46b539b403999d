"""Tokenizers: of characters, for arithmetic, and of a pretrained model, with its chat template."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl.errors import ModelError, sentence
from fp8rl.models.folder import end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*= "
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


class CharTokenizer:
    """One token per character: 4 special tokens, the characters, then fillers to ``vocab_size``.

    The vocabulary is padded to 128, the block of the FP8 recipe; otherwise Megatron-Core and vLLM
    would each pad it differently. The fillers are ordinary tokens such as "<unused19>": an
    untrained policy that samples one writes visible nonsense, and no id is unknown to a decoder.

    A subclass may set other ``tokens`` and the ``pattern`` that matches each of them in a text.

    Attributes:
        vocab_size: number of token ids, 128.
        tokens: the characters.
        pattern: regular expression of one token, for ``re`` and for ``tokenizers``.
        pad_id, bos_id, eos_id, unk_id: ids of the special tokens.
    """

    vocab_size = 128
    tokens: Sequence[str] = CHARACTERS
    pattern = r"[\s\S]"  # not ".", which does not match a newline
    pad_id, bos_id, eos_id, unk_id = range(len(SPECIAL))

    def __init__(self) -> None:
        tokens = [*SPECIAL, *self.tokens]
        tokens += [f"<unused{i}>" for i in range(len(tokens), self.vocab_size)]
        self._tokens = tokens
        self._ids = {token: i for i, token in enumerate(tokens)}

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Return the token ids of ``text``, after BOS unless ``add_bos`` is False, without EOS."""
        ids = [self._ids[token] for token in re.findall(self.pattern, text)]
        return [self.bos_id, *ids] if add_bos else ids

    def answer(self, text: str) -> list[int]:
        """Return the token ids of a completion, with EOS."""
        return [*self.encode(text, add_bos=False), self.eos_id]

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end a completion."""
        return [self.eos_id]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return "".join(self._tokens[i] for i in ids if i >= len(SPECIAL))

    def to_hf(self) -> PreTrainedTokenizerFast:
        """Return the same tokenizer for transformers and vLLM; it adds BOS and never EOS."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        pad, bos, eos, unk = SPECIAL
        tokenizer = Tokenizer(models.WordLevel(self._ids, unk_token=unk))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(self.pattern), "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, self.bos_id)]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=pad,
            bos_token=bos,
            eos_token=eos,
            unk_token=unk,
            padding_side="left",
            clean_up_tokenization_spaces=False,
        )

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into a model folder."""
        self.to_hf().save_pretrained(os.fspath(folder))


class ChatTokenizer:
    """The tokenizer of a pretrained model: prompts are questions of a user, by its chat template.

    Without a template a prompt is the question alone.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._hf: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # of many kinds
            raise ModelError(
                f"The tokenizer in '{folder}' cannot be loaded ({sentence(error)}); give a model "
                "with a tokenizer of transformers."
            ) from error
        own = self._hf.eos_token_id
        self.stop_ids = end_tokens(folder, own)
        if not self.stop_ids:
            raise ModelError(
                f"The tokenizer in '{folder}' has no eos_token, so no answer would end; set it in "
                "tokenizer_config.json."
            )
        self.pad_id: int = self.stop_ids[0] if own is None else own

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""
        if self._hf.chat_template is None:
            return self._hf(text).input_ids
        messages = [{"role": "user", "content": text}]
        prompt = self._hf.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return self._hf(prompt, add_special_tokens=False).input_ids

    def answer(self, text: str) -> list[int]:
        """Return the token ids of a completion, with the token that ends it."""
        return [*self._hf(text, add_special_tokens=False).input_ids, self.pad_id]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self._hf.decode(list(ids), skip_special_tokens=True)
