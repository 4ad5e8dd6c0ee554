"""Text to token ids and back, and the chat template.

The tokenizer is a byte-level BPE, run by the `tokenizers` library. Here it gets one face for all sources, the end
tokens of its model, the template that turns a conversation into text, and a decoder that streams without ever
showing half a character.

Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (2016); Radford et al., GPT-2 (2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

Message = Mapping[str, str]

# How a text is cut into words before bytes are merged, by the name that GGUF files give to the rule.
DIGITS_ALONE = {"smollm": True, "gpt-2": False}  # GPT-2's rule; SmolLM splits off each digit before it
SPECIAL_TYPES = (3, 4)  # GGUF's token types "control" and "user defined"


class Tokenizer:
    """Encode, decode, and render chats.

    `end_ids` are the tokens with which the model ends a text; several, one or none.
    """

    def __init__(
        self,
        backend: Backend,
        end_ids: Sequence[int] = (),
        chat_template: str | None = None,
        special: Mapping[str, str] | None = None,
    ):
        self.backend = backend
        self.end_ids = tuple(end_ids)
        self.chat_template = chat_template
        self.special = dict(special or {})  # bos_token and eos_token as text, for the template

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written out in the text ("<|im_start|>") are read as such; a model's own start token is
        put before the text unless `add_special_tokens` is False."""
        try:
            text.encode()
        except UnicodeEncodeError:  # halves of surrogate pairs, which bytes that are not UTF-8 arrive as
            raise ValueError("the text is not valid Unicode; is it a binary file, or not UTF-8?") from None
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def piece(self, token: int) -> str:
        """One token as text for tables and figures; an incomplete character shows as U+FFFD."""
        return self.backend.decode([token], skip_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as the text that the model was trained on. messages: {"role": ..., "content": ...}."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template; give it plain text to continue")
        for message in messages:
            texts = [message.get(part) for part in ("role", "content")] if isinstance(message, Mapping) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"a message needs 'role' and 'content' as text: {message!r}")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = refuse
        try:
            template = environment.from_string(self.chat_template)
            given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt, **self.special}
            return template.render(given, tools=None, documents=None)  # none, rather than undefined, as in transformers
        except TemplateError as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from None

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)


def refuse(message: str) -> None:
    """`raise_exception` of Hugging Face's templates."""
    raise TemplateError(message)


class Detokenizer:
    """Turns tokens into text one by one. A character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.stream = DecodeStream(skip_special_tokens=True)
        self.ids: list[int] = []
        self.text = ""

    def add(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        self.ids.append(token)
        new = self.stream.step(self.tokenizer.backend, token) or ""
        self.text += new
        return new

    def finish(self) -> str:
        """What is still held back: bytes that never became a character, shown as U+FFFD."""
        rest = self.tokenizer.decode(self.ids)[len(self.text) :]
        self.text += rest
        return rest


def bpe_tokenizer(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], pre_tokenizer: str, **kwargs
) -> Tokenizer:
    """Build a byte-level BPE from the lists that a GGUF file carries; `pre_tokenizer` names its splitting rule."""
    if pre_tokenizer not in DIGITS_ALONE:
        raise ValueError(f"the pre-tokenizer {pre_tokenizer!r} is not known here; known: {', '.join(DIGITS_ALONE)}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges])
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"the merges do not fit the vocabulary ({error})") from None
    backend = Backend(bpe)
    words = [pre_tokenizers.ByteLevel(add_prefix_space=False)]  # its built-in expression is GPT-2's
    if DIGITS_ALONE[pre_tokenizer]:
        words.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(words)
    backend.decoder = decoders.ByteLevel()
    specials = [
        AddedToken(t, special=True, normalized=False)
        for t, kind in zip(tokens, types, strict=True)
        if kind in SPECIAL_TYPES
    ]
    backend.add_special_tokens(specials)
    return Tokenizer(backend, **kwargs)
