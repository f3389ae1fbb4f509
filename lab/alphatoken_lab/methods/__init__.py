"""Token selection and weighting methods that people compare with, one file each.

- From one forward over the rows before training (``static`` keeps it, cached and resumable):
  ``stm``, ``xtf``, ``token_cleaning``, ``sstoken``, ``flow``, ``prift``; masks that were
  fixed before: ``static_mask``.
- From continuations of the model, once: ``cft``.
- From a second model (``second_model``): ``rho_1``, ``token_cleaning``, ``sepo``.
- From the training forward alone: ``talr``, ``dft``, ``gce``, ``eaft``, ``loss_truncation``,
  ``confpo``; of pairs (``preference``): ``ti_dpo``.
- Rows rather than tokens: ``less``, by gradients of a warmed-up LoRA (``lora_warmup``).
- After training: ``merge`` (WiSE-FT: weights between start and end).

Trainers find them by the entry points in ``lab/pyproject.toml``. **Formulas and sources**: each
class's docstring, and docs/policies.md. **Oracle**: values computed by hand in ``tests/lab``; whole
runs in ``tests/integration/test_policy_trainers.py``.
"""
