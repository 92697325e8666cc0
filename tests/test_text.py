"""Text: one BOS, no half characters, kept spaces, and a joined stream that is the tokenizer's own decode."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain, takewhile
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from triton_inflight.errors import RequestError
from triton_inflight.text import PROMPT_TAIL, REPLACEMENT, Detokenizer, encode
from triton_inflight.weights import DEFAULT_REFERENCE, describe

TEXTS = [
    "Hello, world!",
    "  two spaces before and after  ",
    "\n\nlines\n\tand tabs\r\n",
    "emoji 👩‍🚀🏳️‍🌈 and 👍🏽, flags 🇺🇦🇯🇵",
    "Привет, как дела?",
    "你好,世界。日本語のテキスト 한국어",
    "مرحبا بالعالم",
    "e\u0301 a\u0308\u0323 z\u0351\u036b\u0343",
    "math ∀x: ⌈x⌉ = ⌊x⌋ \U0001d518\U0001d52b",
    "def f(x):\n    return x  # 1234567890\n",
    "a genuine \ufffd stays",
    "don't  'quote' . , ! ? n't 's",
]


@pytest.fixture(scope="session")
def byte_level() -> PreTrainedTokenizerBase:
    return describe(DEFAULT_REFERENCE).tokenizer


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sentencepiece vocabulary with byte fallback, as Llama 2 and Mistral have."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    corpus = folder / "corpus.txt"
    words = "the quick brown fox jumps over a lazy dog and says hello world to you while it runs home again"
    pairs = (f"{first} {second}." for first in words.split() for second in words.split())
    corpus.write_text("\n".join([*pairs, "def f(x): return x", "don't 'quote' it"]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@pytest.fixture(scope="session")
def byte_fallback(sentencepiece_file: Path) -> PreTrainedTokenizerBase:
    return LlamaTokenizer.from_pretrained(sentencepiece_file.parent, add_bos_token=True)


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return request.getfixturevalue(request.param)


def stream(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], output: Sequence[int], *, skip: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in output), detokenizer.flush()]


@cache
def alphabet(tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """The tokens of single bytes, however they are spelled; SmolLM2 has none for a few bytes."""
    vocabulary, spelling = tokenizer.get_vocab(), bytes_to_unicode()
    ids = {byte: vocabulary.get(f"<0x{byte:02X}>", vocabulary.get(spelling[byte])) for byte in range(256)}
    return {byte: token_id for byte, token_id in ids.items() if token_id is not None}


def byte_ids(tokenizer: PreTrainedTokenizerBase, data: bytes) -> list[int]:
    return [alphabet(tokenizer)[byte] for byte in data if byte in alphabet(tokenizer)]


def oracle(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], output: Sequence[int], *, skip: bool = True
) -> str:
    """What the whole output adds to the decoded end of the prompt."""
    tail = list(prompt[-PROMPT_TAIL:])

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    before, together = decode(tail), decode([*tail, *output])
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, together, strict=False)))
    return together[shared:]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_the_text_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    prompt = encode(tokenizer, "the quick")
    output = tokenizer.encode(text, add_special_tokens=False)
    parts = stream(tokenizer, prompt, output)
    assert "".join(parts) == oracle(tokenizer, prompt, output)
    assert "".join(parts).lstrip(" ") == text.lstrip(" ")
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in part for part in parts), parts


@pytest.mark.parametrize("text", [text for text in TEXTS if REPLACEMENT not in text])
def test_every_cut_of_a_text_continues_the_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """A prompt that ends anywhere; where it ends inside a character, the output starts with the whole one."""
    ids = encode(tokenizer, f"hello {text}")

    def decode(count: int) -> str:
        return tokenizer.decode(ids[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    whole, of_prompt = decode(len(ids)), 0
    for cut in range(len(ids)):
        if whole.startswith(whole_characters := decode(cut).rstrip(REPLACEMENT)):
            of_prompt = max(of_prompt, len(whole_characters))
        assert "".join(stream(tokenizer, ids[:cut], ids[cut:])) == whole[of_prompt:]


def test_words_after_a_prompt_keep_their_space(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt, whole = encode(tokenizer, "hello"), encode(tokenizer, "hello world")
    assert whole[: len(prompt)] == prompt
    assert "".join(stream(tokenizer, prompt, whole[len(prompt) :])) == " world"


def test_text_without_a_prompt_starts_as_decode_does(byte_fallback: PreTrainedTokenizerBase) -> None:
    output = byte_fallback.encode("hello world", add_special_tokens=False)
    assert "".join(stream(byte_fallback, [], output)) == "hello world"


def test_text_comes_as_soon_as_it_is_whole(byte_level: PreTrainedTokenizerBase) -> None:
    """Held back is only what may still change: each word comes with its own token."""
    output = byte_level.encode("one two three four", add_special_tokens=False)
    assert stream(byte_level, [], output) == ["one", " two", " three", " four", ""]


def test_an_unfinished_character_waits_and_is_flushed(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = encode(tokenizer, "hello")
    ids = tokenizer.encode("🦩", add_special_tokens=False)
    while tokenizer.decode(ids[:1]).strip() == "":
        del ids[0]  # sentencepiece's own leading space
    assert len(ids) > 2, "the test needs a character of several tokens"
    parts = stream(tokenizer, prompt, ids[:-1])
    assert parts[:-1] == [""] * (len(ids) - 1)
    assert parts[-1]
    assert set(parts[-1]) == {REPLACEMENT}
    assert "".join(parts) == oracle(tokenizer, prompt, ids[:-1])


def test_special_tokens_are_left_out_on_request(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = encode(tokenizer, "hello")
    end = tokenizer.eos_token_id
    output = [*tokenizer.encode("the dog", add_special_tokens=False), end, *prompt, end]
    assert "".join(stream(tokenizer, prompt, output)) == oracle(tokenizer, prompt, output)
    shown = "".join(stream(tokenizer, prompt, output, skip=False))
    assert shown == oracle(tokenizer, prompt, output, skip=False)
    assert shown.count(tokenizer.eos_token) == 2
    assert tokenizer.eos_token not in "".join(stream(tokenizer, prompt, output))


def test_tokens_without_text_do_not_break_a_character(tokenizer: PreTrainedTokenizerBase) -> None:
    """Special tokens and ids past the vocabulary between the bytes, as many as one likes."""
    silent = [tokenizer.eos_token_id, len(tokenizer)] * 5
    flamingo = tokenizer.encode("🦩", add_special_tokens=False)
    output = [token_id for byte_id in flamingo for token_id in (byte_id, *silent)]
    assert "".join(stream(tokenizer, encode(tokenizer, "hello"), output)).strip() == "🦩"


def test_what_the_prompt_left_broken_is_not_said_again(tokenizer: PreTrainedTokenizerBase) -> None:
    """A prompt of token ids may end inside a character; if no output finishes it, it stays the prompt's."""
    prompt = [*encode(tokenizer, "hello"), *byte_ids(tokenizer, "🦩".encode()[:3])]
    dog = [
        token_id for token_id in encode(tokenizer, "hello dog") if token_id not in encode(tokenizer, "hello")
    ]
    assert "".join(stream(tokenizer, prompt, dog)) == " dog"
    assert stream(tokenizer, prompt, []) == [""]
    assert "".join(stream(tokenizer, prompt, byte_ids(tokenizer, "🦩".encode()[3:]))) == "🦩"


def test_ids_outside_the_vocabulary_give_no_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Models pad their vocabulary: a row of logits may have more entries than the tokenizer has tokens."""
    output = tokenizer.encode("the dog", add_special_tokens=False)
    padded = [len(tokenizer) + 5, *output, len(tokenizer)]
    assert stream(tokenizer, [], padded)[1:-2] == stream(tokenizer, [], output)[:-1]


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_random_tokens_byte_level(byte_level: PreTrainedTokenizerBase, data: st.DataObject) -> None:
    """Any ids at all, most of them not text: the joined stream is still exactly the tokenizer's decode."""
    token = st.integers(0, len(byte_level) - 1).map(lambda token_id: [token_id])
    # Broken UTF-8 comes from single bytes, and from long characters with their last byte missing.
    character = st.characters(min_codepoint=0x800, codec="utf-8").map(str.encode)
    half = character.map(lambda spelled: spelled[:-1])
    data_bytes = st.one_of(st.binary(max_size=3), character, half).map(lambda raw: byte_ids(byte_level, raw))
    ids = st.lists(st.one_of(token, data_bytes), max_size=25).map(lambda pieces: list(chain(*pieces)))
    prompt, output, skip = data.draw(ids), data.draw(ids), data.draw(st.booleans())
    parts = stream(byte_level, prompt, output, skip=skip)
    assert "".join(parts) == oracle(byte_level, prompt, output, skip=skip)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_random_tokens_byte_fallback(byte_fallback: PreTrainedTokenizerBase, data: st.DataObject) -> None:
    """Random words and whole characters spelled in byte tokens."""
    first_byte = byte_fallback.convert_tokens_to_ids("<0x00>")
    word = st.one_of(st.integers(0, 2), st.integers(first_byte + 256, len(byte_fallback) - 1)).map(
        lambda i: [i]
    )
    character = st.characters(codec="utf-8").map(lambda c: [first_byte + byte for byte in c.encode()])
    ids = st.lists(st.one_of(word, character), max_size=25).map(lambda pieces: list(chain(*pieces)))
    # A tail of the prompt that begins inside a character would be a broken run of byte tokens.
    prompt, output = (
        data.draw(st.lists(word, max_size=8).map(lambda pieces: list(chain(*pieces)))),
        data.draw(ids),
    )
    skip = data.draw(st.booleans())
    parts = stream(byte_fallback, prompt, output, skip=skip)
    assert "".join(parts) == oracle(byte_fallback, prompt, output, skip=skip)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_broken_byte_tokens_decode_as_sentencepiece_does(
    byte_fallback: PreTrainedTokenizerBase, sentencepiece_file: Path, data: st.DataObject
) -> None:
    """Runs of byte tokens that are not UTF-8, where the fast tokenizers' decode would take text back."""
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    first_byte = byte_fallback.convert_tokens_to_ids("<0x00>")
    ordinary = st.integers(first_byte, len(byte_fallback) - 1)
    # Lead and continuation bytes, so that many runs are nearly characters.
    likely = st.sampled_from([0x41, 0x80, 0x9F, 0xA0, 0xC3, 0xE4, 0xED, 0xF0, 0xF4, 0xFF]).map(
        lambda byte: first_byte + byte
    )
    output = data.draw(st.lists(st.one_of(likely, ordinary), max_size=40))
    prompt = reference.encode("hello")
    parts = stream(byte_fallback, prompt, output)
    assert "".join(parts) == reference.decode([*prompt, *output])[len("hello") :]


@pytest.mark.parametrize("length", [200])
def test_broken_bytes_for_ever_neither_wait_nor_pile_up(
    tokenizer: PreTrainedTokenizerBase, length: int
) -> None:
    """A model that emits one stray continuation byte after the other gets its text out as it goes."""
    (stray,) = byte_ids(tokenizer, b"\x80")
    detokenizer = Detokenizer(tokenizer, [])
    told = ""
    for count in range(1, length + 1):
        told += detokenizer.push(stray)
        assert count - 3 <= len(told) <= count
        assert len(detokenizer._window) + len(detokenizer._bytes) <= 12
    assert told + detokenizer.flush() == REPLACEMENT * length


def test_the_window_does_not_grow_with_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    detokenizer = Detokenizer(tokenizer, [])
    output = tokenizer.encode("the quick brown fox 你好 🦩 jumps. " * 30, add_special_tokens=False)
    for token_id in output:
        detokenizer.push(token_id)
        assert len(detokenizer._window) + len(detokenizer._bytes) <= 12


def test_encode_adds_one_bos_at_most(byte_fallback: PreTrainedTokenizerBase) -> None:
    bos, text = byte_fallback.bos_token_id, byte_fallback.bos_token
    plain = encode(byte_fallback, "hello world")
    assert plain[0] == bos
    assert plain.count(bos) == 1
    templated = encode(byte_fallback, f"{text}hello world")
    assert templated[0] == bos
    assert templated.count(bos) == 1
    assert byte_fallback.encode(f"{text}hello world").count(bos) == 2, (
        "the tokenizer alone would add a second"
    )


def test_encode_adds_no_bos_where_the_tokenizer_adds_none(byte_level: PreTrainedTokenizerBase) -> None:
    bos = byte_level.bos_token_id
    assert bos not in encode(byte_level, "hello world")
    templated = f"{byte_level.bos_token * 2}user\nhello"
    assert encode(byte_level, templated) == byte_level.encode(templated), "the client's own tokens stay"


def test_encode_refuses_what_is_no_prompt(byte_level: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RequestError, match="text_input is '', which encodes to no tokens"):
        encode(byte_level, "")
    with pytest.raises(RequestError, match=r"prompt is not valid Unicode text: character 2 .* U\+D83D"):
        encode(byte_level, "ab\ud83d", field="prompt")
