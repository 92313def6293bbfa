"""What runs on the nodes. Standard library only; copied whole into every bundle."""
