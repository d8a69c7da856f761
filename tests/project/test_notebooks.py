"""Every notebook of nbs/ runs, beside the other tests: `tools/check.py notebooks`."""


def test_every_notebook_runs(notebooks):
    pass
