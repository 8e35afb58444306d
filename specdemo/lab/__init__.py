"""Measurements that the page and the command line share."""
