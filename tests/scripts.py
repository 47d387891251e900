"""The repository's scripts, for their tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load_script(path: Path) -> ModuleType:
    """The script at ``path`` as a module, which may import its neighbours as it does when it is run."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def assert_refuses(script: ModuleType, arguments: list[str], message: str, monkeypatch, capsys) -> None:
    """The script's ``parse_arguments`` ends with status 2 and says why."""
    monkeypatch.setattr("sys.argv", [script.__file__, *arguments])
    with pytest.raises(SystemExit) as exit_info:
        script.parse_arguments()
    assert exit_info.value.code == 2 and message in capsys.readouterr().err
