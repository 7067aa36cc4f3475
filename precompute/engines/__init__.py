"""The ordinary command once a device, on this machine or on a Ray cluster."""
