"""What is said over HTTP: requests and answers of the OpenAI API, as far as an engine can keep their promises.

A field that is not understood is refused by name, never passed over. Ours are `top_k`, `min_p`, `repetition_penalty`,
`stop_token_ids`, `ignore_eos`, `policy`, `budget` and `prefix`, and `kept_tokens` and `seen_tokens` in the usage.
"""

import dataclasses
import re
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from jaxkv.errors import BadValue, unknown
from jaxkv.prompts import ROLES
from jaxkv.serving.answer import STOP, Answer, Chance
from jaxkv.serving.asked import STOPS
from jaxkv.serving.engine import Engine
from jaxkv.serving.programs import TOP
from jaxkv.stop_strings import BROKEN, Growing, decoded

NAMES = {"max_new_tokens": "max_tokens", "samples": "n", "stop_tokens": "stop_token_ids"}  # the engine's, and ours
Text = Annotated[str, Field(min_length=1)]
type Several[T] = Annotated[list[T], FailFast()]  # whose first error is enough
type Few[T] = Annotated[list[T], FailFast(), Field(max_length=STOPS)]
Ending = Annotated[str, Field(min_length=1, max_length=1000)]  # looked for whenever there is more text


class Strict(BaseModel):
    """Fields of the declared types alone, and no others but null, by which clients say that they leave a field out."""

    nulls: ClassVar[tuple[str, ...]] = ()  # the fields that say of null what is wrong with it
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name in cls.nulls}


class Part(Strict):
    """A part of a message's content."""

    type: str
    text: str

    @field_validator("type")
    @classmethod
    def _is_text(cls, kind: str) -> str:
        if kind != "text":
            raise PydanticCustomError("no_text", "this server takes parts of type 'text' only")
        return kind


class Message(Strict):
    """A message of a conversation."""

    nulls: ClassVar[tuple[str, ...]] = ("content",)
    role: str
    content: str | Several[Part]
    name: str | None = None

    @field_validator("role")
    @classmethod
    def _is_known(cls, role: str) -> str:
        if role not in ROLES:
            raise PydanticCustomError("no_role", "{said}", {"said": str(unknown("role", role, ROLES))})
        return role

    @field_validator("content", mode="before")
    @classmethod
    def _is_there(cls, content: Any) -> Any:
        if content is None:
            raise PydanticCustomError("no_text", "expected text, for this server has no tools: leave the message out")
        return content

    def plain(self) -> dict[str, Any]:
        """As `jaxkv.generate` takes it."""
        content = self.content if isinstance(self.content, str) else [part.model_dump() for part in self.content]
        return {"role": self.role, "content": content}


class StreamOptions(Strict):
    """What a stream tells besides its pieces."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class TextFormat(Strict):
    """The one form of answers there is."""

    type: Literal["text"]


def _unmoved(given: Any) -> Any:
    if given:
        raise PydanticCustomError("unmoved", "this server moves no chances so: expected nothing, 0 or an empty object")
    return given


Unmoved = AfterValidator(_unmoved)


class Wanted(Strict):
    """What both kinds of requests may say; of what this server has not, that it shall not be done."""

    object: ClassVar[str]
    telling: ClassVar[str]  # the field that says how many likeliest tokens to tell
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: Ending | Few[Ending] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    logit_bias: Annotated[dict[str, Any], Unmoved] | None = None
    presence_penalty: Annotated[float, Unmoved] | None = None
    frequency_penalty: Annotated[float, Unmoved] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Several[int] | None = None
    ignore_eos: bool = False
    policy: str | None = None
    budget: int | None = None
    prefix: str | None = None

    def prompts(self) -> list[Any]:
        """The prompts to be run, each with `n` answers."""
        raise NotImplementedError

    @property
    def tells(self) -> int | None:
        """How many likeliest tokens to tell beside each; None: nothing."""
        raise NotImplementedError

    @property
    def most(self) -> int | None:
        """The most new tokens."""
        return self.max_tokens

    @property
    def names(self) -> dict[str, str]:
        """What the engine's arguments are called here."""
        return NAMES

    def settings(self, engine: Engine, default: int) -> dict[str, Any]:
        """The arguments of `Engine.submit_each`. Raises `BadValue` for another policy than the engine's, and for what
        would say nothing."""
        if self.policy is not None and self.policy != engine.policy.name:
            raise BadValue(
                f"policy={self.policy!r}: this server's rows run {engine.policy.name!r}, which its programs are "
                "compiled for; leave policy out, or ask a server that was started with it"
            )
        if self.tells is not None and not 0 <= self.tells <= TOP:
            raise BadValue(f"{self.telling}={self.tells}: expected 0 to {TOP} likeliest tokens beside each")
        if self.stream_options is not None and not self.stream:
            raise BadValue("stream_options without stream: expected stream=true beside it, or leave it out")
        stop = self.stop_token_ids
        if stop is not None or self.ignore_eos:
            stop = [*(() if self.ignore_eos else engine.params.config.stop_tokens), *(stop or ())]
        drawn = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
        return {
            **drawn,
            "samples": self.n or 1,
            "max_new_tokens": default if self.most is None else self.most,
            "fewer": self.most is None,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "seed": uuid.uuid4().int >> 66 if self.seed is None else self.seed,
            "stop": self.stop,
            "stop_tokens": stop,
            "budget": self.budget,
            "prefix": self.prefix,
            "logprobs": self.tells is not None,
        }


class Completion(Wanted):
    """A body of /v1/completions."""

    object: ClassVar[str] = "text_completion"
    telling: ClassVar[str] = "logprobs"
    prompt: Text | Several[int] | Several[Text] | Several[Several[int]]
    logprobs: int | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None

    def prompts(self) -> list[Any]:
        """One, or several of text or of token ids."""
        several = isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]

    @property
    def tells(self) -> int | None:
        """As the field says."""
        return self.logprobs


class Chat(Wanted):
    """A body of /v1/chat/completions."""

    object: ClassVar[str] = "chat.completion"
    telling: ClassVar[str] = "top_logprobs"
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: TextFormat | None = None

    def prompts(self) -> list[Any]:
        """The conversation."""
        return [[message.plain() for message in self.messages]]

    @property
    def tells(self) -> int | None:
        """As the two fields say."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most(self) -> int | None:
        """The newer field's, or the older one's."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def names(self) -> dict[str, str]:
        """Those of all requests, and the newer field where it was sent."""
        return NAMES if self.max_completion_tokens is None else {**NAMES, "max_new_tokens": "max_completion_tokens"}

    def settings(self, engine: Engine, default: int) -> dict[str, Any]:
        """As those of all requests."""
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise BadValue(
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens}: expected one of "
                "the two"
            )
        if self.top_logprobs and not self.logprobs:
            raise BadValue(f"top_logprobs={self.top_logprobs}: expected logprobs=true beside it, or leave it out")
        return super().settings(engine, default)


def parsed(kind: type[Wanted], body: bytes) -> Any:
    """The request that a body is. Raises `Wrong` for one that is none."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        every = error.errors(include_url=False, include_context=False, include_input=False)
        given = None if every[0]["type"] == "json_invalid" else from_json(body)
        placed = [(_place(each["loc"], each["type"] == "missing", given), each) for each in every]
        # where a field may be this or that: of the type that what was given came nearest to
        place, chosen = max(placed, key=lambda each: (len(each[0]), not each[1]["type"].endswith("_type"), each[0]))
        where = ".".join(map(str, place))
        what = "not a field of this API, or one that this server does not support"
        message = what if chosen["type"] == "extra_forbidden" else chosen["msg"]
        raise Wrong(400, f"{where}: {message}" if where else f"the body: {message}", param=where or None) from None


def _place(names: tuple[Any, ...], missing: bool, given: Any) -> tuple[Any, ...]:
    """Where in the body an error is, of what is there or of what is `missing`: the names without those of types."""
    place = []
    for name in names[: len(names) - missing]:
        if (isinstance(given, list) and isinstance(name, int)) or (isinstance(given, dict) and name in given):
            place.append(name)
            given = given[name]
    return (*place, *names[len(names) - missing :])


@dataclasses.dataclass
class Wrong(Exception):
    """A request that gets an error: its status, what is said, and the field that is to blame."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)

    KINDS: ClassVar[dict[int, str]] = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

    def body(self) -> dict[str, Any]:
        """The error as clients of the API expect it."""
        kind = self.KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass
class Piece:
    """The part of an answer that has not been sent yet: text, and the tokens that were told behind those `before`."""

    text: str
    chances: list[Chance]
    finish: str | None
    before: int


class Reader:
    """Reads an answer in pieces."""

    def __init__(self, answer: Answer, tokenizer: Any):
        self.answer, self._tokenizer = answer, tokenizer
        self._shown, self._told, self._growing = 0, 0, Growing(tokenizer, answer.front)

    def piece(self) -> Piece:
        """What has come since the last one."""
        before = self._told
        finish, chances = self.answer.since(before)
        self._told += len(chances)
        text = self.answer.text() if self._tokenizer is not None else ""
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        ends = finish == STOP and chances and chances[-1].token in self.answer.stop_tokens
        if ends and not decoded(self._tokenizer, [chances[-1].token]):
            chances = chances[:-1]  # a special token is no part of the text that it ends
        return Piece(new, chances, finish, before)

    def offsets(self, piece: Piece) -> list[int]:
        """Where in the text the tokens of the last piece begin; all those of a character where that one begins."""
        tokens = [chance.token for chance in self.answer.chances[: piece.before + len(piece.chances)]]
        texts = [self._growing.text(tokens[:count]) for count in range(piece.before, len(tokens))]
        offsets = [len(text.rstrip(BROKEN)) for text in texts]
        return offsets if piece.finish is None else [min(at, self._shown) for at in offsets]  # before a stop string


class Written:
    """Writes answers as bodies and events, all of one request under one id."""

    def __init__(self, wanted: Wanted, model: str, tokenizer: Any):
        self.wanted, self.chat = wanted, isinstance(wanted, Chat)
        self._tokenizer, self._first = tokenizer, set()
        self._head = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time()),
            "model": model,
        }  # fmt: skip

    def body(self, readers: list[Reader]) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for index, reader in enumerate(readers):
            piece = reader.piece()
            said = {"message": {"role": "assistant", "content": piece.text}} if self.chat else {"text": piece.text}
            choices.append(
                {"index": index, **said, "logprobs": self._chances(piece, reader), "finish_reason": piece.finish}
            )
        return {**self._head, "object": self.wanted.object, "choices": choices, "usage": usage(readers)}

    def event(self, index: int, reader: Reader, piece: Piece) -> dict[str, Any]:
        """A piece of one answer."""
        said: dict[str, Any] = {"text": piece.text}
        if self.chat:
            delta = {"content": piece.text} if piece.text else {}
            said = {"delta": delta if index in self._first else {"role": "assistant", **{"content": ""}, **delta}}
            self._first.add(index)
        choice = {"index": index, **said, "logprobs": self._chances(piece, reader), "finish_reason": piece.finish}
        return self._chunk([choice])

    def last(self, readers: list[Reader]) -> dict[str, Any]:
        """The event that tells the usage."""
        return {**self._chunk([]), "usage": usage(readers)}

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        kind = f"{self.wanted.object}.chunk" if self.chat else self.wanted.object
        chunk = {**self._head, "object": kind, "choices": choices}
        wants = self.wanted.stream_options is not None and self.wanted.stream_options.include_usage
        return {**chunk, "usage": None} if wants else chunk

    def _chances(self, piece: Piece, reader: Reader) -> dict[str, Any] | None:
        count = self.wanted.tells
        if count is None:
            return None
        if self.chat:
            return {
                "content": [
                    {
                        **self._named(chance.token, chance.logprob),
                        "top_logprobs": [self._named(*each) for each in chance.best[:count]],
                    }
                    for chance in piece.chances
                ],
                "refusal": None,
            }
        return {
            "tokens": [self._word(chance.token) for chance in piece.chances],
            "token_logprobs": [chance.logprob for chance in piece.chances],
            "top_logprobs": [self._by_word(chance.best[:count]) for chance in piece.chances],
            "text_offset": reader.offsets(piece),
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._word(token), "logprob": logprob, "bytes": list(spelled(self._tokenizer, token))}

    def _by_word(self, best: Sequence[tuple[int, float]]) -> dict[str, float]:
        """The best first, and of tokens that look alike the best alone."""
        found: dict[str, float] = {}
        for token, value in best:
            found.setdefault(self._word(token), value)
        return found

    def _word(self, token: int) -> str:
        return word_of(self._tokenizer, token)


def word_of(tokenizer: Any, token: int) -> str:
    """The text of one token; without a tokenizer its number."""
    return str(token) if tokenizer is None else tokenizer.decode([token], clean_up_tokenization_spaces=False)


def spelled(tokenizer: Any, token: int) -> bytes:
    """The bytes of one token, also where they are a part of a character only."""
    word = word_of(tokenizer, token)
    if BROKEN not in word:
        return word.encode()
    letters = str(tokenizer.convert_ids_to_tokens(token))
    if fallback := re.fullmatch("<0x([0-9A-F]{2})>", letters):  # SentencePiece's
        return bytes.fromhex(fallback[1])
    return bytes(LETTERS[letter] for letter in letters) if LETTERS.keys() >= set(letters) else word.encode()


def _letters() -> dict[str, int]:
    """The letters by which byte-level BPE writes bytes: those that can be seen by themselves, others behind them."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + at): byte for at, byte in enumerate(rest)}


LETTERS = _letters()


def usage(readers: list[Reader]) -> dict[str, Any]:
    """What was run, and what of it the caches still held at the end (on average over layers, heads and answers)."""
    answers = [reader.answer for reader in readers]
    prompts = {id(answer.group): answer for answer in answers}.values()  # samples share their prompt
    prompt, new = sum(answer.before for answer in prompts), sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(answer.before - answer.prompt_tokens for answer in prompts)},
        "seen_tokens": round(sum(answer.seen for answer in answers) / len(answers), 2),
        "kept_tokens": round(sum(answer.kept for answer in answers) / len(answers), 2),
    }
