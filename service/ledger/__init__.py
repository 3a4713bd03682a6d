"""The ledger port and its stores: the durable state, which must never be lost."""
