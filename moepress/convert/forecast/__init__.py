"""What a conversion will take, said before it begins.

estimate          disk, and time from a short probe of this machine
calibration_cost  memory and operations of calibration, by arithmetic
machines          time on machines that are not here, from published rates
outlook           the three above and the sizes per GPU, for one plan
"""
