"""The properties alone need torch, transformers, hypothesis, numpy, scipy and pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.property.conftest import OPTIONAL

ROOT = Path(__file__).parents[2]
COLLECT = f"""
import sys
for name in {OPTIONAL!r} + ("deepspeed", "lm_eval", "pytest_timeout"):
    sys.modules[name] = None  # importing it fails, as if it were not installed
import pytest
words = ["tests/property", "--collect-only", "-q", "-rs", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*words, "-p", "_hypothesis_pytestplugin"]))
"""


@pytest.mark.slow
def test_every_property_is_collected_or_says_what_is_missing() -> None:
    """Without any pytest plugin but Hypothesis's, and without any optional package."""
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    skipped = re.findall(r"SKIPPED \[\d+\] (\S+?):\d+: (.*)", done.stdout)
    allowed = {f"{name} is not installed" for name in OPTIONAL}
    assert {reason for _, reason in skipped} <= allowed, skipped
    files = {path.name for path in (ROOT / "tests/property").glob("test_*.py")}
    missing = {Path(path).name for path, _ in skipped}
    # What may need a trainer or a picture; everything else is there.
    assert missing <= {name for name in files if name.startswith(FREE)}, missing
    found = re.search(r"(\d+) tests collected", done.stdout)
    assert found
    assert int(found[1]) > 1500


FREE = (
    "test_policies",
    "test_screen",
    "test_trainer",
    "test_fidelity_heatmap",
    "test_operator",
    "test_shapes",
)
"""Files of properties of trainers, of policies in trainers, of pictures, of types at run time."""
