"""Where options come from, what is refused, and that the token is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from client.vllm import settings as under_test
from client.vllm.settings import Settings
from kvstore import config, sources
from kvstore.errors import ConfigError


def test_defaults_are_sound():
    got = Settings.read({}, {})
    assert got.url == f"unix://{config.default_state_directory()}/kvstore.sock"
    assert (got.transport, got.tenant, got.model, got.save) == ("auto", "default", "", "all")
    assert (got.lookup_deadline, got.load_deadline, got.save_deadline) == (0.005, 2.0, 5.0)
    assert (got.connect_deadline, got.max_wait, got.pinned_share) == (1.0, 30.0, 0.5)
    assert got.load is True
    assert got.min_load_tokens == 0
    assert got.reveal_token() is None


@pytest.mark.parametrize("user", [0, 1000])
@pytest.mark.parametrize("state", [None, "", "/somewhere"])
def test_default_socket_is_the_daemons(monkeypatch, user, state):
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    if state is not None:
        monkeypatch.setenv("XDG_STATE_HOME", state)
    environ = {} if state is None else {"XDG_STATE_HOME": state}
    assert under_test.default_state_directory(environ) == config.default_state_directory()
    daemon = config.Config().listen.unix
    assert Settings.read({}, environ).url == f"unix://{daemon}"


def test_extra_config_wins_over_environment():
    environ = {"KVSTORE_TENANT": "env", "KVSTORE_LOOKUP_DEADLINE": "7ms", "KVSTORE_LOAD": "false"}
    got = Settings.read({"tenant": "extra"}, environ)
    assert (got.tenant, got.lookup_deadline, got.load) == ("extra", 0.007, False)


def test_empty_variables_and_the_daemons_own_are_not_read():
    environ = {
        "KVSTORE_TENANT": "",
        "KVSTORE_TOKEN": "",
        "KVSTORE_DRAM__CAPACITY": "8GiB",
        "KVSTORE_CONFIG": "/x",
    }
    assert Settings.read({}, environ) == Settings.read({}, {})


def test_no_variable_means_something_else_to_the_daemon():
    known = sources.keys()
    daemons = {"KVSTORE_" + key.upper().replace(".", "_") for key in known}
    ours = {"KVSTORE_" + name.upper() for name in Settings.model_fields}
    assert not ours & daemons
    assert not any("__" in name for name in ours)
    assert sources.FILE_VARIABLE not in ours


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("5ms", 0.005),
        ("2s", 2.0),
        ("0.5", 0.5),
        (" 1m ", 60.0),
        (".5s", 0.5),
        ("40us", 4e-5),
        (3, 3),
    ],
)
def test_durations(given, seconds):
    assert Settings.read({"load_deadline": given}, {}).load_deadline == pytest.approx(seconds)


@pytest.mark.parametrize(("given", "share"), [("25%", 0.25), (0.5, 0.5), ("0.75", 0.75), (1, 1.0)])
def test_shares(given, share):
    assert Settings.read({"pinned_share": given}, {}).pinned_share == share


def test_an_engine_that_only_saves_may_pin_all_its_blocks() -> None:
    assert Settings.read({}, {}, only_saves=True).pinned_share == 1.0
    assert Settings.read({"pinned_share": 0.5}, {}, only_saves=True).pinned_share == 0.5
    environ = {"KVSTORE_PINNED_SHARE": "50%"}
    assert Settings.read({}, environ, only_saves=True).pinned_share == 0.5


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("lookup_deadline", "5 parsecs"),
        ("lookup_deadline", 0),
        ("lookup_deadline", -1),
        ("lookup_deadline", True),
        ("lookup_deadline", float("nan")),
        ("lookup_deadline", float("inf")),
        ("max_wait", "2h"),
        ("save", "output"),
        ("load", "perhaps"),
        ("pinned_share", 0),
        ("pinned_share", 1.5),
        ("pinned_share", "150%"),
        ("pinned_share", "%"),
        ("pinned_share", True),
        ("min_load_tokens", -1),
        ("min_load_tokens", 1.5),
        ("tenant", ""),
        ("tenant", "x" * 1025),
        ("tenant", "ü" * 600),
        ("tenant", 7),
        ("url", "http://somewhere"),
        ("url", "tcp://host"),
        ("transport", "carrier pigeon"),
    ],
)
def test_impossible_values_are_named_with_their_source(name, given):
    with pytest.raises(ConfigError) as extra:
        Settings.read({name: given}, {})
    text = str(extra.value)
    assert text.startswith(f"{name}: ")
    assert repr(given)[:100] in text
    assert f"(from kv_connector_extra_config.{name})" in text
    if isinstance(given, str) and given:
        variable = f"KVSTORE_{name.upper()}"
        with pytest.raises(ConfigError, match=rf"\(from {variable}\)"):
            Settings.read({}, {variable: given})


def test_every_mistake_is_told_at_once():
    with pytest.raises(ConfigError) as error:
        Settings.read({"save": "x", "load": "perhaps"}, {"KVSTORE_MAX_WAIT": "z"})
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "max_wait",
        "save",
        "load",
    ]


def test_transport_that_the_socket_has_not():
    with pytest.raises(ConfigError, match=r"transport: .*shm.*tcp://host:1"):
        Settings.read({"url": "tcp://host:1", "transport": "shm"}, {})


def test_unknown_option_has_a_hint():
    with pytest.raises(ConfigError, match="urll: unknown option; did you mean url"):
        Settings.read({"urll": "unix:///x"}, {})
    with pytest.raises(ConfigError, match="zzzz: unknown option; known are .*lookup_deadline"):
        Settings.read({"zzzz": 1}, {})


class TestToken:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        file = tmp_path / "token"
        file.write_text("of the file\nsecond line\n")
        return file

    def test_from_the_environment(self):
        assert Settings.read({}, {"KVSTORE_TOKEN": "abc"}).reveal_token() == "abc"

    def test_from_a_file(self, file):
        assert Settings.read({"token_file": str(file)}, {}).reveal_token() == "of the file"
        named = {"KVSTORE_TOKEN_FILE": str(file)}
        assert Settings.read({}, named).reveal_token() == "of the file"

    def test_file_of_the_command_line_wins_and_that_of_the_environment_does_not(self, file):
        environ = {"KVSTORE_TOKEN": "abc"}
        assert Settings.read({"token_file": str(file)}, environ).reveal_token() == "of the file"
        environ["KVSTORE_TOKEN_FILE"] = str(file)
        assert Settings.read({}, environ).reveal_token() == "abc"

    def test_never_in_json_and_never_shown(self):
        with pytest.raises(ConfigError, match="token_file, or KVSTORE_TOKEN") as error:
            Settings.read({"token": "geheim"}, {})
        assert "geheim" not in str(error.value)
        got = Settings.read({}, {"KVSTORE_TOKEN": "geheim"})
        assert "geheim" not in f"{got!r} {got} {got.model_dump()} {got.model_dump_json()}"
        with pytest.raises(ConfigError) as other:
            Settings.read({"save": "x"}, {"KVSTORE_TOKEN": "geheim"})
        assert "geheim" not in str(other.value)

    def test_bad_files(self, tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be read \(from KVSTORE_TOKEN_FILE\)"):
            Settings.read({}, {"KVSTORE_TOKEN_FILE": str(tmp_path / "none")})
        (tmp_path / "empty").write_text("\nabc\n")
        with pytest.raises(ConfigError, match="is empty"):
            Settings.read({"token_file": str(tmp_path / "empty")}, {})


def test_settings_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Settings.read({}, {}).tenant = "other"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KVSTORE_LOOKUP_DEADLIN", "KVSTORE_LOOKUP_DEADLINE"),
        ("KVSTORE_TENNANT", "KVSTORE_TENANT"),
        ("KVSTORE_URI", "KVSTORE_URL"),
    ],
)
def test_misspelled_variables_are_told_of(name, meant):
    sentences = under_test.misspelled({name: "x", meant: "y", "PATH": "/bin"})
    assert sentences == [f"{name} in the environment means nothing; did you mean {meant}?"]


def test_variables_of_others_are_left_alone():
    keys = sources.keys()
    known = [f"KVSTORE_{key.upper().replace('.', '__')}" for key in keys]
    ours = [f"KVSTORE_{name.upper()}" for name in Settings.model_fields]
    daemons = [sources.FILE_VARIABLE, "KVSTORE_CONTROL", "KVSTORE_REDIS_PASSWORD"]
    of_a_service = ["KVSTORE_SERVICE_HOST", "KVSTORE_PORT", "KVSTORE_PORT_9402_TCP_PROTO"]
    names = [*known, *ours, *daemons, *of_a_service]
    assert under_test.misspelled(dict.fromkeys(names, "x")) == []


def test_an_address_that_is_none_has_a_hint():
    with pytest.raises(ConfigError, match=r"did you mean unix:///run/kvstore.sock\?"):
        Settings.read({"url": "/run/kvstore.sock"}, {})


def test_certificates_are_for_tls(tmp_path):
    files = {name: tmp_path / name for name in ("ca", "certificate", "key")}
    environ = {f"KVSTORE_{name.upper()}": str(file) for name, file in files.items()}
    got = Settings.read({"url": "tls://node-1:9410"}, environ)
    assert {name: getattr(got, name) for name in files} == files
    assert Settings.read({"url": "tls://node-1:9410", "ca": "~/ca"}, {}).ca == Path.home() / "ca"
    for url in ("tcp://node-1:9410", "unix:///kvstore.sock"):
        with pytest.raises(ConfigError, match=rf"ca: certificates are for tls://.*{url}"):
            Settings.read({"url": url, "ca": str(files["ca"])}, {})
