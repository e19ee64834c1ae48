"""What a training run will wait for: a node, its link to the store and its workers, on a simulated clock."""

from lightning_stream.simulation.case import QUICK, Part
from lightning_stream.simulation.needs import Shards, Training
from lightning_stream.simulation.result import Simulated, Timeline
from lightning_stream.simulation.run import simulate
from lightning_stream.simulation.settings import CLOUDS, CLOUDS_DATE, Link, Machine, Node, Prices, Work

__all__ = [
    "CLOUDS",
    "CLOUDS_DATE",
    "QUICK",
    "Link",
    "Machine",
    "Node",
    "Part",
    "Prices",
    "Shards",
    "Simulated",
    "Timeline",
    "Training",
    "Work",
    "simulate",
]
