"""python -m vitlab: the command, also for torchrun -m vitlab train ..."""

from vitlab.cli.main import run

run()
