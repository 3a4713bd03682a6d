"""The ledger port and its stores: what is hard, and must never be lost."""
