"""Agreement of the live store with the ledger: publication, recovery, reads in an outage."""
