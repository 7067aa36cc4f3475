"""Tables that name images or hold them: CSV, JSON, Parquet, Arrow, COCO."""
