"""Text and tokens: SmolLM2's tokenizer, built from its GGUF file, equals a byte-level BPE written out below; the chat
template renders the exact text of the training data and cannot leave its sandbox; streaming shows each character once.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import gguf
import pytest
import regex
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers.utils.chat_template_utils import render_jinja_template

from minillm.fetch import default_model
from minillm.tokenizer import Detokenizer, Tokenizer, bpe_tokenizer

# What SmolLM2 cannot write: six control characters and the unassigned planes from U+40000 to U+BFFFF. Its vocabulary
# lacks the bytes that these begin with, and the tokenizer passes over them.
LOST_CONTROLS = "\x04\x06\x13\x14\x16\x1d"
LOST_PLANES = range(0x40000, 0xC0000)
SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<repo_name>": 3, "<empty_output>": 16}
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

common = st.characters(max_codepoint=LOST_PLANES[0] - 1, exclude_categories=["Cs"], exclude_characters=LOST_CONTROLS)
any_text = st.text(common | st.characters(min_codepoint=LOST_PLANES[-1] + 1))
# Only assigned characters: newer ones are letters to one library and nothing to another.
assigned_text = st.text(st.characters(exclude_categories=["Cs", "Cn", "Co"], exclude_characters=LOST_CONTROLS))
words = st.lists(
    st.sampled_from([" the", "tokens", "I'll", " 2048", "\n\n", "   ", "naïve", "北京", "👩‍🚀", "\t", "½"])
).map("".join)


@pytest.fixture(scope="session")
def tokenizer(smollm2) -> Tokenizer:
    return smollm2[1]


# ------------------------------------------------------------------------------------------------ a second opinion


class ReferenceBPE:
    """GPT-2's encoder as its authors describe it: split, write bytes as characters, merge the best pair until none."""

    words = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    digit_or_rest = regex.compile(r"\p{N}|\P{N}+")

    def __init__(self, fields: dict[str, gguf.ReaderField]):
        tokens = fields["tokenizer.ggml.tokens"].contents()
        merges = fields["tokenizer.ggml.merges"].contents()
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in printable]
        self.characters = {byte: chr(byte) for byte in printable} | {b: chr(256 + n) for n, b in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        pieces = (word for part in self.digit_or_rest.findall(text) for word in self.words.findall(part))
        return [self.ids[symbol] for piece in pieces for symbol in self.merge(piece)]

    def merge(self, word: str) -> list[str]:
        symbols = [self.characters[byte] for byte in word.encode()]
        while len(symbols) > 1:
            pairs = ((self.ranks.get(pair, sys.maxsize), i) for i, pair in enumerate(pairwise(symbols)))
            rank, i = min(pairs)
            if rank == sys.maxsize:
                break
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        return symbols


@pytest.fixture(scope="session")
def reference() -> ReferenceBPE:
    return ReferenceBPE(gguf.GGUFReader(default_model()).fields)


@given(text=assigned_text | words)
@example(text="It's 2048; they'll pay $1,234.50 in 3 days.\n\n  Indented\tcode = x ** 2  ")
@example(text="Ünïcödé 北京 👩‍🚀 ½ ²³ ٣٤ \u00a0\u3000x")
@settings(max_examples=300, deadline=None, derandomize=True)
def test_tokens_are_those_of_a_bpe_written_out_by_hand(text, tokenizer, reference):
    assert tokenizer.encode(text) == reference.encode(text)


# --------------------------------------------------------------------------------------------------- text and tokens


@given(text=any_text | words)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_decoding_gives_the_text_back(text, tokenizer):
    assume(not any(token in text for token in SPECIAL))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_the_vocabulary_cannot_write_is_known(tokenizer):
    def is_lost(code: int) -> bool:
        return tokenizer.decode(tokenizer.encode(chr(code))) != chr(code)

    assert "".join(chr(code) for code in range(0x800) if is_lost(code)) == LOST_CONTROLS
    ends_of_planes = [code for plane in range(17) for code in (plane << 16, (plane << 16) + 0xFFFF)]
    assert [code for code in ends_of_planes if is_lost(code)] == [
        code for code in ends_of_planes if code in LOST_PLANES
    ]


def test_digits_are_split_one_by_one(tokenizer):
    assert [tokenizer.piece(token) for token in tokenizer.encode("2048")] == ["2", "0", "4", "8"]
    assert [tokenizer.piece(token) for token in tokenizer.encode("in 1999")] == ["in", " ", "1", "9", "9", "9"]


@pytest.mark.parametrize("token", SPECIAL)
def test_special_tokens_have_their_ids_and_are_hidden_from_the_text(token, tokenizer):
    assert tokenizer.encode(token) == [SPECIAL[token]]
    assert tokenizer.encode(f"a{token}b") == [*tokenizer.encode("a"), SPECIAL[token], *tokenizer.encode("b")]
    assert tokenizer.decode([SPECIAL[token]]) == ""
    assert tokenizer.decode([SPECIAL[token]], skip_special_tokens=False) == token
    assert tokenizer.piece(SPECIAL[token]) == token


def test_the_model_ends_a_turn_with_one_token_and_starts_a_text_with_none(tokenizer):
    assert tokenizer.end_ids == (2,)
    assert tokenizer.special == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.vocab_size == 49152
    assert tokenizer.encode("") == []
    assert tokenizer.encode("The") == tokenizer.encode("The", add_special_tokens=False)


def test_half_of_a_surrogate_pair_is_no_text(tokenizer):
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode("\ud83d")


def test_without_digits_alone_numbers_stay_together():
    tokens = ["1", "2", "12", "<s>"]
    kept = bpe_tokenizer(tokens, [1, 1, 1, 3], ["1 2"], "gpt-2")
    split = bpe_tokenizer(tokens, [1, 1, 1, 3], ["1 2"], "smollm")
    assert kept.encode("12<s>") == [2, 3]
    assert split.encode("12<s>") == [0, 1, 3]


def test_an_unknown_splitting_rule_is_refused():
    with pytest.raises(ValueError, match="'llama-bpe' is not known here; known: smollm, gpt-2"):
        bpe_tokenizer(["a"], [1], [], "llama-bpe")


# ---------------------------------------------------------------------------------------------------- chat templates


def test_a_conversation_renders_as_the_model_was_trained(tokenizer):
    conversation = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    turns = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    system = f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n"
    assert tokenizer.render_chat(conversation) == system + turns + "<|im_start|>assistant\n"
    assert tokenizer.render_chat(conversation, add_generation_prompt=False) == system + turns
    own = [{"role": "system", "content": "Be brief."}, *conversation]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n" + turns + "<|im_start|>assistant\n"
    assert tokenizer.render_chat(own) == expected


def test_the_marks_of_a_chat_become_special_tokens(tokenizer):
    ids = tokenizer.encode_chat([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    text = {word: tokenizer.encode(word) for word in ("system\nS", "user\nU", "\n", "assistant\n")}
    system, user, newline, assistant = text.values()
    assert ids == [1, *system, 2, *newline, 1, *user, 2, *newline, 1, *assistant]


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer(Backend(models.BPE()), chat_template=template, special={"bos_token": "<s>", "eos_token": "</s>"})


HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " there "}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
        "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n  {{ m.content }}\n    {%- endif %}\n{%- endfor %}",
        "{% for m in messages %}\n    {% if loop.first %}\n  A{{ m.content }}\n    {% endif %}\n{% endfor %}\nend\n",
        "{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% if tools is defined %}tools{% endif %}{% if add_generation_prompt %}>{% endif %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    ],
)
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_in_transformers(template, prompt):
    (expected,), _ = render_jinja_template(
        [HI], chat_template=template, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>"
    )
    assert with_template(template).render_chat(HI, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"content": "Hi"}, {"role": "user", "content": None}, "Hi", None, ["user", "Hi"]]
)
def test_a_message_without_role_and_content_is_refused(message, tokenizer):
    with pytest.raises(ValueError, match="a message needs 'role' and 'content' as text"):
        tokenizer.render_chat([HI[0], message])


def test_a_model_without_a_template_takes_no_chat():
    with pytest.raises(ValueError, match="this model has no chat template; give it plain text"):
        with_template(None).render_chat(HI)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "does not take these messages: roles must alternate"),
        ("{% for m in messages %}", "does not take these messages: .*endfor"),
        ("{{ messages[5].content }}", "does not take these messages"),
    ],
)
def test_a_template_that_fails_says_why(template, words):
    with pytest.raises(ValueError, match=words):
        with_template(template).render_chat(HI)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch ' ~ messages[0].content) }}",
    "{{ raise_exception.__globals__['__builtins__'].open(messages[0].content, 'w') }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}{{ ('{0.__class__.__mro__[1].__subclasses__}' | attr('format'))(1) }}",
    "{% set _ = messages.pop() %}",
    "{% set _ = messages[0].update(content='changed') %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(template, tmp_path):
    mark = tmp_path / "written"
    messages = [{"role": "user", "content": str(mark)}]
    with pytest.raises(ValueError, match="does not take these messages"):
        with_template(template).render_chat(messages)
    assert not mark.exists()
    assert messages == [{"role": "user", "content": str(mark)}]


# --------------------------------------------------------------------------------------------------------- streaming


def streamed(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.add(token) for token in ids], detokenizer.finish()


token_ids = st.lists(
    st.integers(0, 49151)  # anything
    | st.integers(0, 16)  # special tokens
    | st.integers(17, 300)  # single bytes, mostly halves of characters and bytes that never make one
)


@given(ids=token_ids)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_streamed_text_is_the_decoded_text(ids, tokenizer):
    """Whatever the tokens: special ones in the middle, halves of characters, bytes that are no text."""
    shown, rest = streamed(tokenizer, ids)
    assert "".join(shown) + rest == tokenizer.decode(ids)
    assert not any(text.endswith("\ufffd") for text in shown)  # might still become a character


@given(text=any_text.filter(lambda text: "\ufffd" not in text), data=st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_half_a_character_is_never_shown(text, data, tokenizer, single_bytes):
    """Byte by byte, the finest cut there is, with special tokens anywhere between."""
    ids = [single_bytes[byte] for byte in text.encode()]
    for _ in range(data.draw(st.integers(0, 3))):
        ids.insert(data.draw(st.integers(0, len(ids))), data.draw(st.integers(0, 16)))
    shown, rest = streamed(tokenizer, ids)
    assert "".join(shown) == text
    assert rest == ""


@pytest.fixture(scope="session")
def single_bytes(tokenizer, reference) -> dict[int, int]:
    """The token of each byte that has one."""
    return {byte: reference.ids[c] for byte, c in reference.characters.items() if c in reference.ids}


def test_an_emoji_appears_with_its_last_byte(tokenizer, single_bytes):
    shown, rest = streamed(tokenizer, [single_bytes[byte] for byte in "é北🚀".encode()])
    assert shown == ["", "é", "", "", "北", "", "", "", "🚀"]
    assert rest == ""


def test_a_character_that_never_ends_shows_as_a_replacement_at_the_finish(tokenizer, single_bytes):
    shown, rest = streamed(tokenizer, [*tokenizer.encode("ok "), single_bytes[0xF0], single_bytes[0x9F]])
    assert "".join(shown) == "ok "
    assert rest == "\ufffd"
