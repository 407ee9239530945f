"""Python that the planner runs and the emitted ``train.py`` contains word for word: what is planned is what is done.

Pure functions over plain values, so that they stand in a script as they are: no imports from the planner, and no
constants of a plan.
"""
