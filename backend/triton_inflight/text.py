"""Text to token ids, and token ids to text one at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from triton_inflight.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are not (yet) a character."""

PROMPT_TAIL = 6
"""How many of the prompt's last tokens a Detokenizer looks at."""

# The window of tokens that are decoded together. It keeps 4 tokens because an unfinished UTF-8
# character has at most 3 bytes, each token has at least one, and one more gives left context.
_WINDOW_LIMIT = 8
_WINDOW_KEPT = 4


def encode(tokenizer: PreTrainedTokenizerBase, text: str, field: str = "text_input") -> list[int]:
    """Token ids of a prompt, with the special tokens that the tokenizer adds by itself.

    A beginning-of-sequence token (BOS) that the text already spells out (a prompt made with a chat template)
    is not added a second time. A tokenizer that adds no BOS adds none here either.

    Args:
        field: the client's name of the text, for the error.

    Raises:
        RequestError: the text holds a lone surrogate, or encodes to no token at all.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{field} is not valid Unicode text: character {error.start} is the lone surrogate "
            f"U+{ord(text[error.start]):04X}; send UTF-8"
        ) from error
    ids: list[int] = tokenizer.encode(text, verbose=False)
    bos, bos_text = tokenizer.bos_token_id, tokenizer.bos_token
    if isinstance(bos_text, str) and text.startswith(bos_text) and tokenizer.encode("")[:1] == [bos]:
        while ids[:2] == [bos, bos]:
            del ids[0]
    if not ids:
        raise RequestError(f"{field} is {text!r}, which encodes to no tokens; send at least one character")
    return ids


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest token: no token stands for more of a text than that."""
    return _vocabulary_of(tokenizer).longest


class Detokenizer:
    """The text of one sequence, token by token.

    The text continues the prompt. With ``tail = prompt_ids[-PROMPT_TAIL:]`` and ``decode`` being
    ``tokenizer.decode(ids, skip_special_tokens=..., clean_up_tokenization_spaces=False)``, the joined results
    of all ``push`` calls and the last ``flush`` are ``decode(tail + output)`` without the beginning that it
    shares with ``decode(tail)``. So a sentencepiece word after a prompt keeps its leading space, a character
    that the prompt left unfinished belongs to the output if the output finishes it, and with an empty prompt
    the text is ``decode(output)``.

    One exception, for tokenizers with byte tokens (``<0x41>``): where a run of byte tokens in the tail or the
    output is not valid UTF-8 as a whole, ``decode`` turns the whole run into replacement characters, even the
    valid characters in it. Text that was sent cannot be taken back, so here each valid character stays and
    each other byte becomes one replacement character; that is also how the sentencepiece library decodes.

    Never half a character: text is held back while it may still become a character, at most 3 bytes. Each
    push decodes a bounded number of tokens, whatever came before, also when the model emits broken bytes for
    ever. Ids without a token (a padded vocabulary) give no text.

    Args:
        prompt_ids: token ids of the prompt, all or only the last ones.
        skip_special_tokens: leave special tokens out of the text.
    """

    # tokenizers' own DecodeStream was not enough: it holds text back without limit while bytes are
    # broken (decoding all of it at every step), raises when a decoder rewrites its past (broken runs of
    # byte tokens), has no way to flush an unfinished end, and only knows fast tokenizers.

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = _vocabulary_of(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        # The last tokens that gave text, their text, and how much of it was returned already.
        self._window: list[int] = []
        self._text = ""
        self._shown = 0
        # Byte tokens of a character that is not whole yet.
        self._bytes: list[int] = []
        # What the prompt left unfinished: it is returned only as part of a character that gets whole.
        self._prompt_bytes = 0
        self._prompt_holds_back = False
        for token_id in prompt_ids[-PROMPT_TAIL:]:
            self.push(token_id)
        self._prompt_bytes = len(self._bytes)
        self._prompt_holds_back = self._shown < len(self._text)

    def push(self, token_id: int) -> str:
        """Take the next token; returns the new text, which may be empty."""
        if self._vocabulary.is_silent(token_id, self._skip_special_tokens):
            return ""
        if token_id in self._vocabulary.byte_values:
            return self._push_byte(token_id)
        return self._give_up_bytes() + self._append([token_id])

    def flush(self) -> str:
        """The text held back so far, as the tokenizer decodes it. No push may follow."""
        rest = self._give_up_bytes()
        start = self._shown + (1 if self._prompt_holds_back else 0)
        self._shown = len(self._text)
        self._prompt_holds_back = False
        return rest + self._text[start:]

    def _append(self, token_ids: list[int]) -> str:
        """Decode the window with more tokens at its end; returns what is new and final."""
        self._window += token_ids
        text = self._decode(self._window)
        # Bytes in the middle of a character decode to one replacement character at the very end. With byte
        # tokens, text from here is always whole.
        holds_back = text.endswith(REPLACEMENT) and not self._vocabulary.byte_values
        end = len(text) - (1 if holds_back else 0)
        start = self._shown
        if self._prompt_holds_back and end > start:
            # The prompt's unfinished character either got whole (ours) or stayed broken (the prompt's).
            start += 1 if text[start] == REPLACEMENT else 0
            self._prompt_holds_back = False
        new = text[start:end]
        self._text, self._shown = text, end
        if len(self._window) > _WINDOW_LIMIT:
            self._shrink_window()
        return new

    def _shrink_window(self) -> None:
        """Forget all but the last tokens, keeping what is held back."""
        kept = self._window[-_WINDOW_KEPT:]
        text = self._decode(kept)
        # Without any text left of it, the next word would lose its leading space.
        if text:
            held_back = len(self._text) - self._shown
            self._window, self._text, self._shown = kept, text, len(text) - held_back

    def _push_byte(self, token_id: int) -> str:
        self._bytes.append(token_id)
        new = ""
        while self._bytes:
            data = bytes(self._vocabulary.byte_values[byte_id] for byte_id in self._bytes)
            try:
                character = codecs.getincrementaldecoder("utf-8")().decode(data)
            except UnicodeDecodeError:
                new += self._give_up_first_byte()
                continue
            if character:
                new += self._append_bytes(self._bytes, character)
                self._bytes = []
                self._prompt_bytes = 0
            break
        return new

    def _give_up_bytes(self) -> str:
        """A character that will never be whole: one replacement character for each of its bytes."""
        new = ""
        while self._bytes:
            new += self._give_up_first_byte()
        return new

    def _give_up_first_byte(self) -> str:
        new = self._append_bytes(self._bytes[:1], REPLACEMENT)
        del self._bytes[0]
        if self._prompt_bytes > 0:
            self._prompt_bytes -= 1
            return ""
        return new

    def _append_bytes(self, byte_ids: list[int], text: str) -> str:
        # Byte tokens enter the window only to become its first text (where the tokenizer may strip a space):
        # next to each other in one window, a broken one would spoil the valid ones.
        return text if self._text else self._append(byte_ids)

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


class _Vocabulary:
    """What a Detokenizer must know about single tokens; made once for each tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        candidates = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self._special = frozenset(
            token_id
            for token_id in candidates
            if tokenizer.decode([token_id], skip_special_tokens=True) == ""
            and tokenizer.decode([token_id], skip_special_tokens=False) != ""
        )
        vocabulary = tokenizer.get_vocab()
        self.longest = max(map(len, vocabulary), default=1)
        self._known = frozenset(token_id for token, token_id in vocabulary.items() if token)
        self.byte_values: dict[int, int] = {}
        letter = vocabulary.get(_byte_token(ord("A")))
        # The name alone says nothing: the tokenizer must also decode it as a byte.
        if letter is not None and tokenizer.decode([letter]) == "A":
            for value in range(256):
                if (token_id := vocabulary.get(_byte_token(value))) is not None:
                    self.byte_values[token_id] = value

    def is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the token never gives text, wherever it stands."""
        return (skip_special_tokens and token_id in self._special) or token_id not in self._known


def _byte_token(value: int) -> str:
    return f"<0x{value:02X}>"


_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, _Vocabulary] = WeakKeyDictionary()


def _vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> _Vocabulary:
    vocabulary = _vocabularies.get(tokenizer)
    if vocabulary is None:
        vocabulary = _vocabularies[tokenizer] = _Vocabulary(tokenizer)
    return vocabulary
