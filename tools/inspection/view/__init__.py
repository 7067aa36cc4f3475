"""``leandit view``: a store or a run as a web page on this machine, which reads and never writes."""
