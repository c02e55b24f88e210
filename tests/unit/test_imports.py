"""Who imports whom, where import-linter cannot say it: submodules of other packages, and "nothing but"."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "asdsim"
STANDARD = sys.stdlib_module_names


def imports(path: Path) -> set[str]:
    """Return the absolute modules and names that a file imports anywhere; relative imports keep their dots."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found.add(base)
            found.update(
                f"{base.rstrip('.')}.{alias.name}" if node.module else base + alias.name for alias in node.names
            )
    return found


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path) if not name.startswith(".")}


def test_rules_import_math_only() -> None:
    allowed = {"__future__", "math"}
    for_annotations = {"collections.abc", "typing"}
    others = [path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "rules").glob("*.py")]
    not_rules = ("__init__", "frozen", "scoring", "settings", "spec")  # what uses rules and what they are made of
    own = {f"rules/{name}.py" for name in not_rules}
    assert own < set(others)
    for name in sorted(set(others) - own):
        # The other rules may stand on what a rule is made of, and on each other.
        allowed_here = allowed | for_annotations | ({".spec", ".sglang"} if name != "rules/asd.py" else set())
        found = imports(PACKAGE / name)
        assert not {item for item in found if item not in allowed_here and item.rpartition(".")[0] not in allowed_here}


def test_only_one_file_imports_numba_cuda() -> None:
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(item == "numba.cuda" or item.startswith(("numba.cuda.", "numba_cuda")) for item in imports(path))
    }
    assert users <= {"walk/cuda.py"}


def test_the_oracle_needs_the_standard_library_only() -> None:
    path = PACKAGE / "oracle" / "walk.py"
    assert roots(path) <= STANDARD
    assert not {item for item in imports(path) if item.startswith(".")}


def test_models_are_imported_where_models_run() -> None:
    models = {"torch", "transformers", "accelerate", "safetensors", "gguf"}
    users = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if roots(path) & models}
    assert users <= {"capture", "engines", "live"}


def test_no_file_imports_pyplot() -> None:
    users = [path.name for path in PACKAGE.rglob("*.py") if "matplotlib.pyplot" in imports(path)]
    assert users == []


@pytest.mark.parametrize(
    "call", ["import asdsim", "import asdsim.cli", "import asdsim.rules.asd", "import asdsim.rules.settings"]
)
def test_light_modules_stay_light(call: str) -> None:
    heavy = "{'torch', 'transformers', 'numba', 'polars', 'pyarrow', 'matplotlib', 'scipy', 'upath', 'fsspec'}"
    code = f"{call}\nimport sys\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "[]"


def test_plots_need_no_pyplot_at_run_time() -> None:
    code = "import asdsim.plots.all, sys\nprint('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout.split() == ["False", "False"]
