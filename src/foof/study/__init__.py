"""The study: the paper put to the test. Runs become records, records become verdicts, drawings and one report.

Its rooms, each using only those before it: `data`, `train` (one run), `search` (many), `paper` (claims and verdicts), `show` (the report).
"""
