"""What selection buys on real language models: the grid behind docs/selection.md."""
