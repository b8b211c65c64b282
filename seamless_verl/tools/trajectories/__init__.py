"""Lists, shows and exports the sessions of a run's journal."""
