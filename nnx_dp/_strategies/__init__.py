"""One launcher for each strategy, behind one interface (`Launch` in `_interface.py`)."""
