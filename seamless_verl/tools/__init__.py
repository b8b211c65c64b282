"""Tools beside the product. Nothing in the product imports them: only a process start, or a command by its name."""
