"""The page: layout, lanes, trees, charts, replay. It reads Run records, never tensors."""
