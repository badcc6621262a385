"""Prompt files: every broken line is named, and no prompt is on both sides of the split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spectrain.config.data_schema import DataConfig
from spectrain.data.prompts import Conversation, PromptSplit, find_prompt_file, load_prompts, split_prompts
from spectrain.errors import ConfigError, InputError

REAL_PROMPTS = Path(__file__).resolve().parents[3] / "shared" / "data"
GOOD = b'{"turns": ["good"]}\n'


def write(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_all_fields(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    path = write(
        tmp_path / "mixed.jsonl",
        {"id": "a", "turns": ["one", "two"], "system": "be brief", "category": "chat", "tools": [tool]},
        {"turns": ["three"], "language": "de", "system": None, "id": None},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u1"},
                {"role": "assistant", "content": "a1"},
                {"role": "user", "content": "u2"},
                {"role": "assistant", "content": "a2"},
            ]
        },
        {"messages": [{"role": "user", "content": "to be answered"}], "system": "outside"},
    )
    assert load_prompts(path) == [
        Conversation(id="a", turns=("one", "two"), system="be brief", domain="chat", tools=(tool,)),
        Conversation(id="mixed-2", turns=("three",), language="de"),
        Conversation(id="mixed-3", turns=("u1", "u2"), system="s", answers=("a1", "a2")),
        Conversation(id="mixed-4", turns=("to be answered",), system="outside"),
    ]
    assert [conversation.where for conversation in load_prompts(path)] == [f"{path}:{line}" for line in (1, 2, 3, 4)]


def test_byte_order_mark_crlf_blank_lines_and_odd_separators(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"turns": ["first"]}\r\n\r\n'
        + '{"turns": ["a\u2028b\u0085c"]}\r\n'.encode()
        + b'{"turns": ["last"]}\n\n  \n\n'
    )
    conversations = load_prompts(path)
    assert [conversation.turns[0] for conversation in conversations] == ["first", "a\u2028b\u0085c", "last"]
    assert [conversation.id for conversation in conversations] == ["windows-1", "windows-3", "windows-4"]


BROKEN = {
    "cut off": (b'{"turns": ["hel', "not JSON"),
    "plain text": (b"How are you?", "not JSON"),
    "trailing comma": (b'{"turns": ["a"],}', "not JSON"),
    "single quotes": (b"{'turns': ['a']}", "not JSON"),
    "two objects": (b'{"turns": ["a"]} {"turns": ["b"]}', "not JSON"),
    "raw control character": (b'{"turns": ["a\tb"]}', "not JSON"),
    "NaN": (b'{"turns": ["a"], "tools": [{"x": NaN}]}', "NaN is not a JSON value"),
    "endless number": (b'{"turns": ["a"], "tools": [{"x": ' + b"9" * 5000 + b"}]}", "not usable JSON"),
    "endless brackets": (b"[" * 100_000, "not usable JSON"),
    "opening bracket of an array": (b"[", "not JSON"),
    "a list": (b'["a"]', "a list instead of an object"),
    "a text": (b'"a"', "a text instead of an object"),
    "a number": (b"12", "a number instead of an object"),
    "null": (b"null", "null instead of an object"),
    "empty object": (b"{}", "no 'turns'"),
    "no turns": (b'{"id": "x"}', "no 'turns'"),
    "empty turns": (b'{"turns": []}', "'turns' is empty"),
    "turns a text": (b'{"turns": "hello"}', "'turns' is a text instead of a list"),
    "turns null": (b'{"turns": null}', "'turns' is null instead of a list"),
    "turn a number": (b'{"turns": ["a", 3]}', "turns[1] is a number instead of a text"),
    "turn null": (b'{"turns": [null]}', "turns[0] is null instead of a text"),
    "turn a message": (b'{"turns": [{"role": "user", "content": "a"}]}', "turns[0] is an object instead of a text"),
    "an image": (
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}]}',
        "messages[0].content holds a part of type 'image_url': prompts are text alone",
    ),
    "turn blank": (b'{"turns": ["a", " \\n"]}', "turns[1] is blank"),
    "half a surrogate": (b'{"turns": ["\\ud83d"]}', "turns[0] holds half of a surrogate pair"),
    "misspelt field": (b'{"turn": ["a"]}', "unknown field 'turn': did you mean 'turns'?"),
    "unknown field": (b'{"prompt": "a"}', "unknown field 'prompt': use turns"),
    "repeated field": (b'{"turns": ["a"], "turns": ["b"]}', "field 'turns' comes twice"),
    "repeated field inside": (b'{"turns": ["a"], "tools": [{"x": 1, "x": 2}]}', "field 'x' comes twice"),
    "id a number": (b'{"id": 3, "turns": ["a"]}', "'id' is a number instead of a text"),
    "id blank": (b'{"id": "", "turns": ["a"]}', "'id' is blank"),
    "system a list": (b'{"system": ["s"], "turns": ["a"]}', "'system' is a list instead of a text"),
    "system blank": (b'{"system": " ", "turns": ["a"]}', "'system' is blank"),
    "category a boolean": (b'{"category": true, "turns": ["a"]}', "'category' is true instead of a text"),
    "language a number": (b'{"language": 1, "turns": ["a"]}', "'language' is a number instead of a text"),
    "tools an object": (b'{"tools": {}, "turns": ["a"]}', "'tools' is an object instead of a list"),
    "tool a text": (b'{"tools": ["f"], "turns": ["a"]}', "tools[0] is a text instead of an object"),
    "not UTF-8": (b'{"turns": ["caf\xe9"]}', "not UTF-8"),
    "turns and messages": (b'{"turns": ["a"], "messages": []}', "both 'turns' and 'messages'"),
    "no messages": (b'{"messages": []}', "no user message"),
    "messages a text": (b'{"messages": "a"}', "'messages' is a text instead of a list"),
    "message a text": (b'{"messages": ["a"]}', "messages[0] is a text instead of an object"),
}


def messages(*pairs: tuple[object, object]) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in pairs]}).encode()


BROKEN |= {
    "assistant first": (
        messages(("assistant", "a")),
        'messages[0] has role "assistant" where system or user must be',
    ),
    "user twice": (messages(("user", "a"), ("user", "b")), 'messages[1] has role "user" where assistant must be'),
    "assistant twice": (
        messages(("user", "a"), ("assistant", "b"), ("assistant", "c")),
        'messages[2] has role "assistant" where user must',
    ),
    "system late": (messages(("user", "a"), ("system", "b")), 'messages[1] has role "system"'),
    "system twice": (messages(("system", "a"), ("system", "b")), 'messages[1] has role "system" where user must be'),
    "only system": (messages(("system", "a")), "no user message"),
    "unknown role": (messages(("human", "a")), 'messages[0] has role "human"'),
    "role a list": (messages((["user"], "a")), 'messages[0] has role ["user"]'),
    "role missing": (b'{"messages": [{"content": "a"}]}', "messages[0] has role null"),
    "content missing": (b'{"messages": [{"role": "user"}]}', "messages[0].content is null"),
    "content in parts": (
        messages(("user", [{"type": "text", "text": "a"}])),
        "messages[0].content is a list instead of a text",
    ),
    "content blank": (messages(("user", "a"), ("assistant", "")), "messages[1].content is blank"),
    "message field": (
        b'{"messages": [{"role": "user", "content": "a", "name": "x"}]}',
        "messages[0] has an unknown field 'name'",
    ),
    "last unanswered": (messages(("user", "a"), ("assistant", "b"), ("user", "c")), "the last message is the user's"),
    "two systems": (b'{"system": "s", "messages": [{"role": "system", "content": "t"}]}', "no user message"),
    "two systems, one user": (
        b'{"system": "s", "messages": [{"role": "system", "content": "t"}, {"role": "user", "content": "a"}]}',
        "a system prompt both in 'system' and in 'messages'",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_line_is_named(tmp_path: Path, name: str) -> None:
    line, reason = BROKEN[name]
    path = tmp_path / "broken.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(InputError) as caught:
        load_prompts(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert reason in message
    assert "\n" not in message


FIELD_NAMES = st.sampled_from(["turns", "messages", "role", "content", "system", "id", "tools", "category", "language"])
LEAVES = st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["user", "assistant", "system"])
JSON_VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(FIELD_NAMES, inner))


@given(st.binary() | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_gives_prompts_or_an_input_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes(data)
    try:
        conversations = load_prompts(path)
    except InputError:
        return
    assert conversations
    assert all(turn.strip() for conversation in conversations for turn in conversation.turns)


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n", b"\xef\xbb\xbf"])
def test_file_without_prompts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"empty\.jsonl holds no prompts"):
        load_prompts(path)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="is no plain file"):
        load_prompts(tmp_path)


def test_repeated_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "ids.jsonl", {"id": "x", "turns": ["a"]}, {"turns": ["b"]}, {"id": "x", "turns": ["c"]})
    with pytest.raises(InputError, match=r"ids\.jsonl:3: id 'x' is that of line 1"):
        load_prompts(path)
    path = write(tmp_path / "ids.jsonl", {"id": "ids-2", "turns": ["a"]}, {"turns": ["b"]})
    with pytest.raises(InputError, match=r"ids\.jsonl:2: id 'ids-2' is that of line 1"):
        load_prompts(path)


def test_digest_is_of_what_the_target_is_shown() -> None:
    base = Conversation(id="a", turns=("t",), system="s", tools=({"x": 1, "y": 2},), domain="d")
    same = Conversation(
        id="b", turns=("t",), system="s", tools=({"x": 1, "y": 2},), answers=("answer",), language="en", source="f:1"
    )
    others = [
        Conversation(id="a", turns=("t", "t"), system="s", tools=base.tools),
        Conversation(id="a", turns=("s",), system="t", tools=base.tools),
        Conversation(id="a", turns=("t",), tools=base.tools),
        Conversation(id="a", turns=("t",), system="s"),
        Conversation(id="a", turns=("t",), system="s", tools=({"y": 2, "x": 1},)),
    ]
    assert base.prompt_digest() == same.prompt_digest()
    assert len({base.prompt_digest(), *(other.prompt_digest() for other in others)}) == 6


def test_files_are_found_beside_the_working_directory_then_among_the_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, shipped = tmp_path / "here", tmp_path / "shipped"
    write(shipped / "chat.jsonl", {"turns": ["shipped"]})
    write(shipped / "code.jsonl", {"turns": ["shipped"]})
    write(here / "code.jsonl", {"turns": ["mine"]})
    write(here / "chat" / "other.jsonl", {"turns": ["a folder of that name is no file"]})
    monkeypatch.chdir(here)
    found = {
        "chat": shipped / "chat.jsonl",
        "chat.jsonl": shipped / "chat.jsonl",
        "code": here / "code.jsonl",
        str(shipped / "code"): shipped / "code.jsonl",
        "chat/other": here / "chat" / "other.jsonl",
    }
    assert {name: find_prompt_file(name, [shipped], "data.train").resolve() for name in found} == found
    hints = {"chatt": "did you mean chat?", "zzz": "shipped prompts (chat, code)", "": "", "a\0b": "", "x" * 5000: ""}
    for name, hint in hints.items():
        with pytest.raises(InputError) as caught:
            find_prompt_file(name, [shipped], "data.train")
        assert "data.train: no prompt file" in str(caught.value)
        assert hint in str(caught.value)


def split(tmp_path: Path, train: list[str], heldout: list[str] | None = None, **options: object) -> PromptSplit:
    write(tmp_path / "train.jsonl", *({"turns": [text]} for text in train))
    if heldout is not None:
        write(tmp_path / "heldout.jsonl", *({"turns": [text]} for text in heldout))
    names = () if heldout is None else ("heldout",)
    return split_prompts(DataConfig(train=("train",), heldout=names, **options), [tmp_path])  # type: ignore[arg-type]


def texts(conversations: list[Conversation]) -> list[str]:
    return [conversation.turns[0] for conversation in conversations]


MANY = [f"prompt {i}" for i in range(1000)]


def test_heldout_by_hash(tmp_path: Path) -> None:
    whole = split(tmp_path, MANY, heldout_fraction=0.2, max_heldout=None)
    train, heldout = texts(whole.train), texts(whole.heldout)
    assert sorted(train + heldout) == sorted(MANY)
    assert 140 < len(heldout) < 260  # 200 +- 4.7 standard deviations
    assert heldout == sorted(heldout, key=MANY.index)

    # Other prompts and another order change no prompt's side; another seed does.
    part = split(tmp_path, MANY[:0:-3], heldout_fraction=0.2, max_heldout=None)
    assert set(texts(part.heldout)) == set(heldout) & set(MANY[:0:-3])
    other = split(tmp_path, MANY, heldout_fraction=0.2, max_heldout=None, seed=1)
    assert set(texts(other.heldout)) != set(heldout)


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_each_side_gets_at_least_one_prompt(tmp_path: Path, fraction: float) -> None:
    result = split(tmp_path, ["a", "b", "c"], heldout_fraction=fraction)
    assert sorted(texts(result.train) + texts(result.heldout)) == ["a", "b", "c"]
    assert min(len(result.train), len(result.heldout)) == 1


def test_maxima_are_drawn_by_seed_and_keep_order(tmp_path: Path) -> None:
    drawn = [
        texts(split(tmp_path, MANY, heldout=["x", "y", "z"], max_train=100, max_heldout=2, seed=seed).train)
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 100
    assert drawn[0] == sorted(drawn[0], key=MANY.index)
    assert drawn[0] != MANY[:100]
    assert len(split(tmp_path, MANY, heldout=["x", "y", "z"], max_heldout=2).heldout) == 2
    # The draw is independent of the division: prompts far from the held-out end of the hash are no more likely to be
    # drawn.
    half = split(tmp_path, MANY, heldout_fraction=0.5, max_train=100, max_heldout=None)
    more = set(texts(split(tmp_path, MANY, heldout_fraction=0.75, max_train=None, max_heldout=None).heldout))
    assert 25 < len(more & set(texts(half.train))) < 75


def test_duplicates_are_dropped_and_the_first_kept(tmp_path: Path) -> None:
    result = split(tmp_path, ["a", "b", "a", "c", "b"], heldout=["x", "x"])
    assert texts(result.train) == ["a", "b", "c"]
    assert [conversation.id for conversation in result.train] == ["train-1", "train-2", "train-4"]
    assert texts(result.heldout) == ["x"]


def test_heldout_prompts_that_are_trained_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        split(tmp_path, ["a", "b", "c"], heldout=["x", "c", "a", "y"], max_train=1)
    message = str(caught.value)
    assert "2 of its 4 prompts are training prompts too" in message
    assert f"{tmp_path / 'heldout.jsonl'}:2" in message
    assert f"{tmp_path / 'train.jsonl'}:3" in message


def test_system_prompt_for_those_without(tmp_path: Path) -> None:
    write(
        tmp_path / "train.jsonl",
        {"turns": ["a"]},
        {"turns": ["b"], "system": "own"},
        {"turns": ["a"], "system": "given"},
    )
    write(tmp_path / "heldout.jsonl", {"turns": ["c"]})
    data = DataConfig(train=("train",), heldout=("heldout",), system="given")
    result = split_prompts(data, [tmp_path])
    assert [(c.turns[0], c.system) for c in result.train + result.heldout] == [
        ("a", "given"),
        ("b", "own"),
        ("c", "given"),
    ]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (DataConfig(), "data.train names no prompt file"),
        (DataConfig(train=("one",)), "data.train has a single prompt"),
        (DataConfig(train=("one",), heldout=("one",)), "1 of its 1 prompts are training prompts too"),
        (DataConfig(train=("one",), system=" "), "data.system is blank"),
    ],
)
def test_impossible_splits(tmp_path: Path, data: DataConfig, reason: str) -> None:
    write(tmp_path / "one.jsonl", {"turns": ["a"]})
    with pytest.raises(ConfigError, match=reason):
        split_prompts(data, [tmp_path])


@pytest.mark.skipif(not REAL_PROMPTS.is_dir(), reason="real prompt files are not here")
def test_real_prompt_files() -> None:
    files = sorted(REAL_PROMPTS.glob("*.jsonl"))
    for path in files:
        expected = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        loaded = load_prompts(path)
        assert [(c.id, list(c.turns), c.domain) for c in loaded] == [
            (r["id"], r["turns"], r.get("category")) for r in expected
        ]
    train, heldout = (tuple(str(path) for path in files if word in path.name) for word in ("gsm8k_train", "gsm8k_test"))
    if train and heldout:
        result = split_prompts(DataConfig(train=train, heldout=heldout, max_train=256, max_heldout=32), [])
        assert (len(result.train), len(result.heldout)) == (256, 32)
