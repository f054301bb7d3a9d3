"""The study: the paper put to the test. Runs become records, records become verdicts, figures and one report."""
