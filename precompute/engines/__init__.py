"""The ordinary command once per device, on this machine or on a Ray cluster."""
