"""Meshes: points with quadrature weights."""


class Grid:
    pass


class PointCloud:
    pass
