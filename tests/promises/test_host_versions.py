"""Versions of hosts: an older one is an error, a newer one a warning; what is declared is what the
tests run with."""

import configparser
import re
import warnings
from pathlib import Path

import pytest

from tp_headloss import integrations

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "scripts/hosts.txt").read_text()


@pytest.fixture
def require(monkeypatch):
    """Function (host, version) -> the warnings of an adapter that is imported with this version
    installed."""
    integrations._warn_of_newer.cache_clear()

    def required(distribution, version):
        monkeypatch.setattr(integrations.importlib.metadata, "version", lambda name: version)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            integrations.require(distribution)
        return [str(warning.message) for warning in seen]

    return required


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2rc1", "0.19.2+cu13"])
def test_a_tested_version_says_nothing(require, version):
    assert require("megatron-core", version) == []


def test_an_older_version_is_refused(require):
    with pytest.raises(ImportError, match=r"megatron-core >= 0.16.1 .*got 0.15.3"):
        require("megatron-core", "0.15.3")
    with pytest.raises(ImportError, match=r"transformers >= 5.16.1 .*got 4.57.1"):
        require("transformers", "4.57.1")


@pytest.mark.parametrize("host", integrations.TESTED)
def test_a_newer_version_warns_once_by_its_name_and_goes_on(require, host):
    (warning,) = require(host, "99.0.0")
    assert f"{host} 99.0.0 is newer" in warning and integrations.TESTED[host][1] in warning
    assert require(host, "99.0.0") == []
    assert len(require(host, integrations.TESTED[host][1])) == 1  # another version


def test_a_host_that_is_not_installed_is_named():
    with pytest.raises(
        ImportError, match=r"pip install '.\[torchtitan\]' in a checkout .*\), and there is none"
    ):
        integrations.require("torchtitan")


def test_a_checkout_of_the_sources_says_its_own_version(tmp_path, monkeypatch):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("__version__ = '0.17.1'")
    monkeypatch.syspath_prepend(tmp_path)
    assert integrations.require("megatron-core") == (0, 17, 1)


def test_the_extras_ask_for_the_oldest_versions_that_are_tested():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for host, (oldest, _, extra) in integrations.TESTED.items():
        assert (
            f"{host.replace('_', '-')}>={oldest}" in config["options.extras_require"][extra].split()
        )


@pytest.mark.parametrize("host", integrations.TESTED)
def test_declared_is_what_runs(host):
    """From the oldest version to the newest in scripts/hosts.txt, of which later patches are taken
    for tested, too."""
    oldest, untested, _ = (
        integrations._release(version) for version in (*integrations.TESTED[host][:2], "0")
    )
    pins = [integrations._release(v) for v in re.findall(rf"^{host}==([\d.]+)", PACKAGES, re.M)]
    # verl brings a transformers of its own
    tested = sorted(version for version in pins if version >= oldest)
    assert tested[0] == oldest and (tested[-1][0], tested[-1][1] + 1) == untested
