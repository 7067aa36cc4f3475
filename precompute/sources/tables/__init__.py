"""Tables that name pictures or hold them: CSV, JSON, Parquet, Arrow, COCO."""
