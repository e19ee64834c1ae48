"""Every host that drives a loader, as a small adapter, and the runs that the resume contract compares."""
