"""Dockerfiles, read as the stages and steps of a build. What is not supported is named with its line, never dropped.

Text becomes instructions (`lines.py`), their words lose quotes and variables (`words.py`), and stages are made of them (`reading.py`), as values
of `stages.py`; `mounts.py` reads what a RUN mounts. Which files of a directory a COPY means is beside this: `cli/context.py`. Read first: `reading.py`.
"""
