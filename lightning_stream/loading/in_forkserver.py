"""Imported by a forkserver before it forks workers: what they need, and the signals of the job, which are not for it.

Its end would look to the trainer like the end of all workers.
"""

from lightning_stream import loader  # noqa: F401 - and so torch
from lightning_stream.loading.worker_signals import restore_in_forks
from lightning_stream.processes import JOB_SIGNALS, leave_job_signals_to_the_parent

leave_job_signals_to_the_parent()
restore_in_forks(JOB_SIGNALS)
