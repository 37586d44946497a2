"""Ladders of training runs: a plan becomes runs through the training entrypoint, and their report.

schema.py, places.py and plan_file.py read a plan, plan.py makes runs (runs.py) of it, budget.py and measure.py
estimate what they cost and remarks.py tells what the report will lack, local.py trains them on this machine and
slurm.py on a cluster, finish.py evaluates, fits and reports, and climb.py does it all.
"""
