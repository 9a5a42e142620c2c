"""The hunt: random problems, gradients, certificates, files, recipes and kills, checked by independent oracles.

``make hunt MINUTES=10`` goes on where the last hunt with the same seed stopped; from the repository root,
``PYTHONPATH=src:tests python -m hunt --help`` says more. A case is a seed, a kind, a path (``plain``, or ``engine``
with all that exists for speed) and a number, and is drawn from these alone: ``make hunt SEED=0/problems/plain/17`` runs
it again. Oracles are written anew in float64 (:mod:`hunt.oracle`): dense solves, dense Jacobians and dense
eigenvalues, on the CPU whatever the device of the library.
"""
