package dns

import "syscall"

// freeBind lets a socket have an address before the address exists: the slots' gateway may come later, or go and return.
func freeBind(network, _ string, conn syscall.RawConn) error {
	level, option := syscall.IPPROTO_IP, syscall.IP_FREEBIND
	if network == "udp6" || network == "tcp6" {
		const ipv6FreeBind = 78 // linux/in6.h; the syscall package does not have it
		level, option = syscall.IPPROTO_IPV6, ipv6FreeBind
	}
	var failure error
	err := conn.Control(func(descriptor uintptr) {
		failure = syscall.SetsockoptInt(int(descriptor), level, option, 1)
	})
	if err != nil {
		return err
	}
	return failure
}
