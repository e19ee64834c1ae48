"""From an order to batches: workers, transport, collating, and the position of a run. Torch begins here."""
