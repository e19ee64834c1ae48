"""Imported by a forkserver before it forks workers: the signals of the job are not for it.

Its end would look to the trainer like the end of all workers.
"""

from lightning_stream.loading.worker_signals import restore_in_forks
from lightning_stream.processes import JOB_SIGNALS, leave_job_signals_to_the_parent

leave_job_signals_to_the_parent()
restore_in_forks(JOB_SIGNALS)
