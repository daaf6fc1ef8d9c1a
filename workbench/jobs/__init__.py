"""Many independent jobs: in processes of this machine, or on a cluster."""
