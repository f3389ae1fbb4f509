"""Former places of modules: importing one of them warns, and gives the module where it is now.

Public names are imported from ``alphatoken`` itself and never moved. These are for code that
reached into modules before they had rooms.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["FORMER", "install"]

FORMER = {
    "adapter": "model.protocol",
    "adapters": "model",
    "adapters.dispatch": "model.dispatch",
    "adapters.optimizers": "direction.optimizers",
    "adapters.transformers": "model.transformers",
    "adapters.updates": "direction.updates",
    "attention": "model.attention",
    "batch": "model.batch",
    "capture": "model.capture",
    "cli.loading": "train.loading",
    "compare.loading": "train.loading",
    "contraction": "estimate.contraction",
    "drift": "direction.drift",
    "drift_parts": "direction.drift_parts",
    "estimators": "estimate.estimators",
    "fidelity.scoring_cost": "fidelity.cost",
    "fisher": "direction.fisher",
    "forward_mode": "estimate.forward_mode",
    "interaction": "select.interaction",
    "layer_choice": "model.layer_choice",
    "losses": "select.losses",
    "moments": "direction.moments",
    "objective": "direction.objective",
    "precision": "support.precision",
    "preconditioner": "direction.preconditioner",
    "progress": "support.progress",
    "proofs": "estimate.proofs",
    "readout": "estimate.columns",
    "sampling": "direction.sampling",
    "schedule": "select.schedule",
    "selection": "select.masks",
    "sharding": "model.sharding",
    "storage": "support.storage",
    "target": "direction.current",
    "train.policy_mixin": "train.policy_weigher",
    "trunk": "model.partial_forward",
    "vocabulary": "model.vocabulary",
    "weights": "select.weights",
}
"""Former module -> module now, both within ``alphatoken``.

``direction`` is not among them, since it is a package now: its names are in ``direction.algebra``.
Of ``readout`` and ``objective`` only what stayed is found: token values are made in
``estimate.token_values``, gradients of parameters in ``estimate.gradients``.
"""


class _Former(MetaPathFinder, Loader):
    """Finds former names only.

    It is asked first: ``alphatoken.adapters`` is ``alphatoken.model`` today, and the usual finder
    would load that folder's files a second time under the former name.
    """

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # ``path`` may be a namespace package's own type, which is no Sequence.
        package, _, rest = name.partition(".")
        if package != "alphatoken" or rest not in FORMER:
            return None
        return ModuleSpec(name, self, is_package=rest == "adapters")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        now = f"alphatoken.{FORMER[spec.name.partition('.')[2]]}"
        # Frames of the import system are not counted: the warning points at the import.
        warnings.warn(
            f"{spec.name} is {now} now; the former name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        module = importlib.import_module(now)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run where it is now; the import system has only exchanged its spec."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Once for the process."""
    if not any(isinstance(finder, _Former) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Former())
