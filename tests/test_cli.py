"""The command line as a user meets it: output, exit status, errors that say what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import daf_rs
from daf_rs import cli

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments, code=None):
    """`python -m daf_rs` in a process of its own, or `code` that stands for it."""
    command = [sys.executable, *(["-c", code] if code else ["-m", "daf_rs"]), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(command, cwd=ROOT / "python", env=environment, capture_output=True, text=True, timeout=200)


def test_info_prints_every_fact(capsys):
    assert cli.main(["info"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["daf_rs"].startswith(daf_rs.__version__)
    assert lines["Python"] == sys.version.split()[0]
    assert {"torch", "threads", "CUDA", "platform", "instruction"} <= set(lines)
    assert lines["CUDA"].startswith("built: no")
    assert daf_rs.build_info()["isa"] in lines["instruction"]


def test_info_as_json_is_what_info_returns(capsys):
    assert cli.main(["info", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(cli.info(), default=str))
    assert printed["cuda"]["built"] is False
    assert "CUDA kernels" in printed["cuda"]["reason"]
    assert printed["build"]["version"] == daf_rs.__version__


def test_module_runs_as_a_program():
    done = run("info")
    assert done.returncode == 0, done.stderr
    assert daf_rs.__version__ in done.stdout


def test_info_shows_the_forced_instruction_set():
    code = "import os, sys; os.environ['DAF_ISA'] = 'scalar'; from daf_rs.cli import main; sys.exit(main(['info']))"
    done = run(code=code)
    assert done.returncode == 0, done.stderr
    assert "active scalar" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["train"], "invalid choice"),
        (["demo", "--bits", "9"], "1 to 8"),
        (["demo", "--bits", "0"], "1 to 8"),
        (["demo", "--epochs", "0"], "from 1 up"),
        (["demo", "--threads", "many"], "from 1 up"),
        (["info", "--xml"], "unrecognized"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_allowed(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("module", "package"), [("sklearn", "scikit-learn"), ("rich", "rich")])
def test_demo_says_what_to_install(module, package):
    code = f"import sys; sys.modules[{module!r}] = None; from daf_rs.cli import main; sys.exit(main(['demo']))"
    done = run(code=code)
    assert done.returncode == 1
    assert f"needs {package}" in done.stderr
    assert "pip install 'daf_rs[demo]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_checks_matplotlib_before_training(tmp_path):
    code = "import sys; sys.modules['matplotlib'] = None; from daf_rs.cli import main; sys.exit(main(sys.argv[1:]))"
    done = run("demo", "--plot", str(tmp_path / "out.png"), code=code)
    assert done.returncode == 1
    assert "needs matplotlib" in done.stderr


def test_demo_refuses_a_plot_in_a_folder_that_is_not_there(tmp_path):
    pytest.importorskip("matplotlib")
    done = run("demo", "--plot", str(tmp_path / "nowhere" / "out.png"))
    assert done.returncode == 1
    assert "create it first" in done.stderr


def test_demo_trains_compares_and_plots(tmp_path):
    for module in ("sklearn", "rich", "matplotlib"):
        pytest.importorskip(module)
    plot = tmp_path / "out.png"
    done = run("demo", "--epochs", "2", "--threads", "1", "--bits", "4", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    rows = {cells[0].strip(): [c.strip() for c in cells[1:]] for cells in _cells(done.stdout)}
    plain, ours, ratio = rows["saved activations, peak"][:3]
    assert float(plain.split()[0]) > 4 * float(ours.split()[0])
    assert float(ratio.split("x")[0]) > 4
    # Chance is 10 %, two epochs reach 98 %.
    accuracies = [float(cell.split()[0]) for cell in rows["test accuracy"][:2]]
    assert min(accuracies) > 80
    assert all(float(cell.split()[0]) > 0 for cell in rows["training time"][:2])
    assert plot.read_bytes().startswith(b"\x89PNG")


def _cells(text):
    return [line.strip("│┃| \n").replace("┃", "│").split("│") for line in text.splitlines() if "│" in line]
