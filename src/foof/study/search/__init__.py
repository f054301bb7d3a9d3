"""Many runs: presets, grids, the store of records, and the sweep on all cores or a Dask cluster."""
